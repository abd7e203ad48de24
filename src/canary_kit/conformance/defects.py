"""`Defects`: bugs planted in an engine by its session, to be found under a plugin with views of the engine itself."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from canary_core.batch import BatchView
from canary_core.guard.canary import Canary
from canary_core.guard.listener import StepListener
from canary_core.plugins.hookspecs import hookimpl
from canary_core.records import Kind, Phase
from canary_core.violation import Violation
from canary_kit.conformance import traffic
from canary_kit.conformance.problems import Culprit, Nonconforming
from canary_kit.conformance.requirements import Requirements, needs
from canary_kit.conformance.session import EngineSession
from canary_kit.conformance.stage import Ask, Stage, fill
from canary_kit.conformance.trials import ANSWERED, MOST_DROPPED, found_instead

MISREAD = (Kind.POSITION, Kind.TOKEN, Kind.PREFIX, Kind.UNWRITTEN, Kind.FREED)
"""Findings about a slot of another request."""
MISCOUNTED = (Kind.READ_LENGTH, Kind.WRITE_INPUT, Kind.WRITE_SLOT, Kind.SLOT_RANGE, *MISREAD)
MISFED = (Kind.WRITE_INPUT,)
"""Told at once, not when the wrong token is read."""
_OF_SEQUENCES = (Kind.POSITION, Kind.TOKEN, Kind.PREFIX, Kind.WRITE_INPUT)
"""Findings about what a request's sequence should be."""
TURNS = 4
"""Forwards until each table of attention's was compared once: one of them in each (see `GivenTables.compare`)."""


@dataclass(frozen=True, slots=True)
class Defect:
    """A bug to ``plant`` with the session, about a request. One of ``kinds`` must be found; where it is not, ``part``
    is to blame, and ``advice`` says where to look. ``what``: the bug in words."""

    plant: Callable[[EngineSession, str], None]
    kinds: tuple[Kind, ...]
    part: Culprit
    what: str
    advice: str
    turns: int = 1
    """Forwards that may have to be broken until one is looked at."""


class Defects(Requirements):
    """Tests with a bug of the engine, planted by the session. A view made from itself is silent about such bugs."""

    # A session that breaks the input of every forward breaks the writes of prompts, too; others may break decodes only.
    @needs("slot_mapping", "token_ids")
    def test_a_misplaced_write_of_a_prompt_is_named(self) -> None:
        """A token of a prompt that goes to another slot than the table says is told, as one of a decode is."""
        advice = "give SlotTable.write_slots, the engine's own list of slots that it writes, in every forward"
        bug = Defect(
            lambda session, name: session.misplace_write(name),
            (Kind.WRITE_SLOT,),
            "BatchAdapter",
            "a prompt's token was written to a wrong slot",
            advice,
        )
        self._prefill(bug)

    @needs("token_ids")
    def test_a_foreign_token_is_named(self) -> None:
        """A forward that computes another token than the request's own is told, in a prompt and in a decode."""
        bug = Defect(
            lambda session, name: session.misfeed(name),
            MISFED,
            "BatchAdapter",
            "a forward computed another token than the request's",
            "expected_tokens must come from the requests' own lists, and token_ids from what the forward reads; one "
            "made from the other says nothing",
        )
        self._prefill(bug)
        self._decode(bug)

    @needs("positions")
    def test_shifted_positions_are_named(self) -> None:
        """A forward that computes a token at another position is told."""
        bug = Defect(
            lambda session, name: session.shift_positions(name),
            (Kind.WRITE_INPUT,),
            "BatchAdapter",
            "a forward computed a token at the next position",
            "give BatchView.positions, the very tensor that the forward reads, not one made from the lengths",
        )
        self._prefill(bug)
        self._decode(bug)

    @needs("lengths")
    def test_wrong_lengths_are_named(self) -> None:
        """A forward whose lengths on the device are not those of the scheduler is told."""
        advice = "prefix_lens and new_lens, or ReadTable.lens, must be what is read, not made from lists on the host"
        for tokens in (-1, 1):
            bug = Defect(
                lambda session, name, tokens=tokens: session.miscount(name, tokens),  # type: ignore[misc]
                MISCOUNTED,
                "BatchAdapter",
                f"a forward was given a length that is {tokens:+d} token",
                advice,
            )
            self._decode(bug, table_interval=1)

    @needs("tables")
    def test_a_foreign_slot_is_named(self) -> None:
        """A forward that reads another request's slot is told: by its content, and where both hold the same token at
        the same position, by what comes before it."""
        for alike, kinds, advice in (
            (False, MISREAD, "the tables must be what attention reads, not made from lists on the host"),
            (
                True,
                (Kind.PREFIX,),
                "only the sequence before differs: is BatchView.anchors 0 for these rows, are writers those of the "
                "requests, or does the table come from lists on the host",
            ),
        ):
            with self._stage() as stage:
                one, other = self._twins(alike)
                stage.submit(one, other)
                stage.step_until(one.name, ANSWERED)
                stage.step_until(other.name, ANSWERED)
                position = len(one.tokens) // 2
                what = f"a forward read position {position} of {one.name} from a slot of {other.name}"
                self._find_defect(
                    stage,
                    one,
                    Defect(
                        lambda session, name, at=position, near=other.name: session.misplace_read(  # type: ignore[misc]
                            name, at, near
                        ),
                        kinds,
                        "BatchAdapter",
                        what,
                        advice,
                    ),
                )

    @needs("roll_back", "lengths")
    def test_dropped_tokens_are_cleared(self) -> None:
        """Slots that a roll back has dropped hold nothing: a forward that still reads them is told."""
        for dropped in self.roll_backs:
            with self._stage() as stage:
                asks = self._by_length(4, dropped)
                stage.submit(*asks)
                for ask in asks:
                    stage.step_until(ask.name, MOST_DROPPED + 1)
                for ask in asks:
                    stage.session.roll_back(ask.name, dropped)
                    stage.session.miscount(ask.name, dropped)
                seen = len(stage.onlooker.rows)
                for _ in range(3):
                    # A prompt that goes on may come first.
                    stage.step()
                stage.drain()
                told = [v for v in stage.violations if v.kind in (Kind.UNWRITTEN, Kind.FREED)]
                for ask in asks:
                    row = next(r for r in stage.onlooker.rows[seen:] if ask.name in str(r.request))
                    wanted = range(row.prefix - dropped, row.prefix)
                    missing = set(wanted) - {v.position for v in told if ask.name in str(v.request)}
                    if missing:
                        raise Nonconforming(
                            "slot events",
                            f"{dropped} tokens of {ask.name} were dropped from position {wanted.start} on, a forward "
                            f"read them all the same, and nothing was found at {sorted(missing)}"
                            f"{found_instead(stage)}: tell canary.slots.clear, not forget, of every slot that is "
                            "dropped of a page that is kept",
                        )

    @needs("copies", "fork")
    def test_a_copy_that_leaves_something_out_is_found(self) -> None:
        """A fork whose copy forgets a half of a layer is told."""
        for layer, half in ((0, self.halves[0]), (self.layers - 1, self.halves[-1])):
            with self._stage() as stage:
                # What an earlier engine left may be the same bytes, and a copy that is left out no bug.
                fill(stage.session)
                stage.session.miscopy(layer, half)
                self._fork_all(stage, 2)
                found = self._await(stage, lambda v: v.kind is Kind.BYTES)
                if found is None or (found.layer, found.half) != (layer, half):
                    raise Nonconforming(
                        "slot events",
                        f"a fork's copy left {half} of layer {layer} out, and told was {found}{found_instead(stage)}: "
                        "tell canary.slots.copy, by which the records travel with the bytes, not forget or import",
                    )

    @needs("graphs")
    def test_a_stale_buffer_is_named(self) -> None:
        """A forward that computes what was left in a graph's buffer is told."""
        bug = Defect(
            lambda session, name: session.keep_stale(name),
            MISFED,
            "BatchAdapter",
            "a buffer of the forward kept another token",
            "the view must be of the buffers that the forward reads, not of what is copied there; wrap the function "
            "that gets them",
        )
        self._prefill(bug)
        self._decode(bug)

    @needs("sampled")
    def test_the_sampler_is_followed(self) -> None:
        """Of requests whose own tokens a view does not know, a foreign token is told by what the sampler gave, and
        nothing else is."""
        with self._stage(_Unexpecting()) as stage:
            self._serve(stage, self._apart(5))
            stage.drain()
            if stage.violations:
                raise Nonconforming(
                    "hooks",
                    "the sampler is said to have given other tokens than the engine goes on with: are those of "
                    "canary.sampled.give the sampler's, in the order of the view's rows, -1 where a prompt goes on? "
                    f"{stage.violations[0]}",
                )
        bug = Defect(
            lambda session, name: session.misfeed(name),
            MISFED,
            "hooks",
            "a forward computed another token than the sampler gave, and the view knew no expected tokens",
            "call canary.sampled.follow once, and canary.sampled.give after each forward, with the sampler's own "
            "tokens, in the order of the view's rows",
        )
        self._decode(bug, _Unexpecting())

    @needs("identities", "prefix_cache")
    def test_a_hit_across_identities_is_named(self) -> None:
        """Requests of two identities do not share slots; where the engine mixes them up, that is told."""
        (ask,) = self._alike(1)
        with self._stage() as stage:
            self._submit_as(stage, "one", ask)
            self._submit_as(stage, "two", Ask("second", ask.tokens, ask.new_tokens))
            self._submit_as(stage, "one", Ask("third", ask.tokens, ask.new_tokens))
            self._require_own_identities(stage)
            stage.session.mix_identities()
            stage.session.submit_as("three", "fourth", ask.tokens, ask.new_tokens)
            if self._await(stage, lambda v: v.kind is Kind.PREFIX) is None:
                known = len({c.writers.anchor(name) for c in stage.canaries for name in ("third", "fourth")}) > 1
                raise Nonconforming(
                    "BatchAdapter" if known else "hooks",
                    f"a request hit the prefix of another identity, and nothing was found{found_instead(stage)}: call "
                    "canary.writers.identify where requests arrive, with all that keys the prefix cache, and give "
                    "BatchView.anchors, never 0 for a request that is known",
                )

    @needs("contents", "prefix_cache")
    def test_a_hit_across_contents_is_named(self) -> None:
        """Requests with other embeddings under the same tokens do not share slots; where they do, that is told."""
        (ask,) = self._alike(1)
        with self._stage() as stage:
            for name, seed in (("first", 1), ("second", 2), ("third", 1)):
                stage.session.submit_embedded(seed, name, ask.tokens, ask.new_tokens)
                stage.finish()
            stage.require_silence("requests with embeddings")
            stage.session.mix_contents()
            stage.session.submit_embedded(3, "fourth", ask.tokens, ask.new_tokens)
            if self._await(stage, lambda v: v.kind is Kind.PREFIX and bool(v.identity)) is None:
                own = torch.tensor(ask.tokens)
                known = any(c.writers.contents.over("fourth", own) is not own for c in stage.canaries)
                raise Nonconforming(
                    "BatchAdapter" if known else "hooks",
                    f"a request hit the prefix of other embeddings, and nothing was found{found_instead(stage)}: tell "
                    "put_embeddings where requests arrive, after forget, and give the view's token_ids by "
                    "writers.contents.given and expected_tokens by writers.contents.over",
                )

    @needs("weights", "prefix_cache")
    def test_a_hit_across_a_change_of_the_weights_is_named(self) -> None:
        """Where the prefix cache is flushed with a change, nothing is told; where it is kept, the first hit is."""
        (ask,) = self._alike(1)
        with self._stage() as stage:
            self._serve(stage, [ask])
            for number in range(2):
                stage.session.change_weights(kept=False)
                self._serve(stage, [Ask(f"anew {number}", ask.tokens, ask.new_tokens)])
                self._serve(stage, [Ask(f"hit {number}", ask.tokens, ask.new_tokens)])
            stage.require_silence("changes of weights with a flushed cache", "hooks")
            stage.session.change_weights(kept=True)
            stage.session.submit("stale", ask.tokens, ask.new_tokens)
            if self._await(stage, lambda v: v.kind is Kind.PREFIX and bool(v.identity)) is None:
                raise Nonconforming(
                    "hooks",
                    "a request hit a prefix that older weights computed, and nothing was found"
                    f"{found_instead(stage)}: call canary.step.weights_changed after each change, and give "
                    "BatchView.anchors, never 0 for a request that is known",
                )

    @needs("names", "prefix_cache")
    def test_names_may_come_again(self) -> None:
        """A request with an earlier one's name is another request, also where it hits as many tokens as that had."""
        for length in (n for n in (16, 32) if n + 2 < self.longest_prompt):
            shared = traffic.prompt(self.longest_prompt, self.vocabulary, "shared")
            with self._stage() as stage:
                self._serve(stage, [Ask("donor", shared, 2)])
                self._serve(stage, [Ask("again", traffic.prompt(length - 1, self.vocabulary, "own"), 2)])
                self._serve(stage, [Ask("again", (*shared[: length + 1], 1), 4)])
                stage.drain()
                if stage.violations and stage.violations[0].kind in _OF_SEQUENCES:
                    raise Nonconforming(
                        "hooks",
                        "a request has an earlier one's name, and is taken for it: call canary.writers.forget(name) "
                        f"where requests arrive. {stage.violations[0]}",
                    )
                stage.require_silence("requests with names that came before")

    def test_stores_are_told_rightly(self) -> None:
        """Where the store of each layer is told, it is told of the right one, once it was issued."""
        with self._stage(store_check=True) as stage:
            self._serve(stage, self._apart(5))
            stage.drain()
            if stage.violations:
                raise Nonconforming(
                    "hooks",
                    "with CANARY_STORE_CHECK there are findings on an engine that does nothing wrong: is "
                    "canary.step.stored told of the right layer and halves, after the store and on its stream? "
                    f"{stage.violations[0]}",
                )
            if "stores" in self.abilities and not stage.counter("noted_stores"):
                raise Nonconforming("hooks", "no store was told: call canary.step.stored where a layer stores K and V")

    @needs("stores")
    def test_what_spoils_a_store_is_found(self) -> None:
        """A bit that flips right after a layer was stored, while its forward goes on, is told."""
        for layer, half in ((0, self.halves[0]), (self.layers - 1, self.halves[-1])):
            bug = Defect(
                lambda session, name, to=(layer, half): session.spoil_store(*to, name),  # type: ignore[misc]
                (Kind.BYTES,),
                "hooks",
                f"a bit of {half} flipped right after layer {layer} was stored",
                "call canary.step.stored where each layer was stored, not at the forward's end",
            )
            self._decode(bug, store_check=True, accept=lambda v: v.phase is Phase.POST_FORWARD)

    @needs("read_tables")
    def test_a_foreign_table_of_attention_is_named(self) -> None:
        """Tables that attention is given are compared with the engine's own, in each forward that is due."""
        with self._stage(table_interval=1) as stage:
            self._serve(stage, self._apart(5))
            stage.require_silence("tables of attention")
            if not stage.counter("tables_compared"):
                if any(canary.step.tables.names for canary in stage.canaries):
                    raise Nonconforming(
                        "BatchAdapter",
                        "tables were given, and no position of them was compared: a row is compared from "
                        "ReadTable.first to ReadTable.end, and lengths alone are no table",
                    )
                raise Nonconforming(
                    "hooks", "no table was compared: ask canary.step.tables.due, and give ReadTables to compare"
                )
        bug = Defect(
            lambda session, name: session.misread(name),
            (Kind.READ_TABLE,),
            "BatchAdapter",
            "attention was given a table with another slot",
            "ReadTable.given must be the table that attention reads, and ReadTable.kept the engine's own",
            TURNS,
        )
        self._prefill(bug, table_interval=1)
        self._decode(bug, table_interval=1)

    def _prefill(self, bug: Defect, **settings: Any) -> None:
        """Plants ``bug`` before the first forward of a prompt; what is found must be about the prompt."""
        with self._stage(**settings) as stage:
            (ask,) = self._apart(1)
            for turn in range(bug.turns):
                tokens = traffic.prompt(min(self.longest_prompt, 9), self.vocabulary, f"short {turn}")
                # As many forwards after each prompt as are not after the one before, so that turns differ.
                prompt = Ask(f"{ask.name}-{turn}", tokens, 6 - turn)
                stage.submit(prompt)
                bug.plant(stage.session, prompt.name)
                newest = len(tokens) - 1 + ANSWERED // 3
                if self._found(stage, prompt, bug, lambda v, last=newest: v.position is None or v.position <= last):  # type: ignore[misc]
                    return
                stage.finish()
            self._unfound(stage, bug, "at a prompt")

    def _decode(
        self, bug: Defect, *plugins: object, accept: Callable[[Violation], bool] = lambda v: True, **settings: Any
    ) -> None:
        """Plants ``bug`` while a request is decoded."""
        with self._stage(*plugins, **settings) as stage:
            ask = self._running(stage, new_tokens=12)
            self._find_defect(stage, ask, bug, "at a decode", accept)

    def _find_defect(
        self,
        stage: Stage,
        ask: Ask,
        bug: Defect,
        moment: str = "",
        accept: Callable[[Violation], bool] = lambda v: True,
    ) -> None:
        stage.require_silence("a request")
        for _ in range(bug.turns - 1):
            bug.plant(stage.session, ask.name)
            stage.step()
        bug.plant(stage.session, ask.name)
        if not self._found(stage, ask, bug, accept):
            self._unfound(stage, bug, moment)

    def _found(self, stage: Stage, ask: Ask, bug: Defect, accept: Callable[[Violation], bool]) -> bool:
        """Whether ``bug`` is told in the next steps. Raises `Nonconforming` where told of another request."""
        found = self._await(stage, lambda v: v.kind in bug.kinds and accept(v))
        if found is not None:
            self._need_name(found, found.request or found.stored_request, ask.name)
        return found is not None

    def _unfound(self, stage: Stage, bug: Defect, moment: str) -> None:
        raise Nonconforming(
            bug.part, f"{bug.what}{moment and f', {moment}'}, and nothing was found{found_instead(stage)}: {bug.advice}"
        )

    def _require_own_identities(self, stage: Stage) -> None:
        """Nothing is found while the engine keeps identities apart."""
        stage.drain()
        if stage.violations and stage.violations[0].kind is Kind.PREFIX:
            raise Nonconforming(
                "BatchAdapter",
                "requests of two identities share nothing, and are told to: BatchView.anchors must be those of "
                f"canary.writers.anchors(names), in the rows' order. {stage.violations[0]}",
            )
        stage.require_silence("requests of two identities")

    def _submit_as(self, stage: Stage, identity: str, ask: Ask) -> None:
        stage.session.submit_as(identity, ask.name, ask.tokens, ask.new_tokens)
        stage.finish()

    def _twins(self, alike: bool) -> tuple[Ask, Ask]:
        """Two long prompts: with all tokens the same but the first one, or with nothing in common."""
        one = traffic.prompt(self.longest_prompt, self.vocabulary, "twin")
        other = one if alike else traffic.prompt(self.longest_prompt, self.vocabulary, "no twin")
        return Ask("one", (1, *one[1:]), ANSWERED + 9), Ask("other", (2, *other[1:]), ANSWERED + 9)


class _Unexpecting(StepListener):
    """A plugin: takes the requests' own tokens out of every view."""

    @hookimpl
    def canary_attached(self, canary: Canary) -> None:
        """Follows the Canary's forwards."""
        canary.step.add(self)

    def before(self, batch: Any, view: BatchView | None) -> BatchView | None:
        """The view without expected tokens."""
        return None if view is None else dataclasses.replace(view, expected_tokens=None)
