"""`Requirements`: tests for every plugin, and for abilities of its engine."""

import functools
from collections.abc import Callable
from typing import Any

from canary_core.config.faults import FaultSpec
from canary_core.errors import ViolationError
from canary_core.records import Kind
from canary_core.violation import Violation
from canary_kit.conformance.footprints import Footprints, require_coverage
from canary_kit.conformance.functions import changed, functions_of
from canary_kit.conformance.problems import Culprit, Nonconforming
from canary_kit.conformance.session import Ability
from canary_kit.conformance.stage import Ask, Drive, fill
from canary_kit.conformance.trials import ANSWERED, FORKS, MOST_DROPPED, Poke, Trials, found_instead
from canary_kit.conformance.truth import require_truth

CLEAN_REQUESTS = 20
_OF_BYTES = ("real_kv_used", "real_kv_unused_cache", "real_kv_post_forward", "lost_write", "stray_write")
"""Faults of one source."""


def needs(*abilities: Ability) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Marks a test to run where all ``abilities`` are declared, and else to skip; the first is the one tested."""

    def declare(test: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(test)
        def checked(suite: "Requirements") -> None:
            for ability in abilities:
                suite._need(ability)
            test(suite)

        checked.ability = abilities[0]  # type: ignore[attr-defined]
        return checked

    return declare


class Requirements(Trials):
    """Tests of a plugin under an engine without bugs, and of the flips and faults to be found."""

    # What every plugin must do

    @needs("uninstall")
    def test_uninstalling_restores_the_engine(self) -> None:
        """After `canary_uninstall` the engine's functions are its own again, and its forwards run unguarded."""
        # The first of all: what it leaves behind would be taken for the engine's own by the others.
        self._load()
        before = functions_of(self.engine_package)
        self._need_functions(before)
        with self._stage() as stage:
            self._serve(stage, self._apart(1))
        others = changed(before, functions_of(self.engine_package))
        if others:
            raise Nonconforming(
                "hooks",
                f"after canary_uninstall these are not the engine's own: {', '.join(others)}; put back what "
                "canary_install replaced (canary_core.Patches does)",
            )
        forwards = stage.onlooker.forwards
        self._serve_bare()
        if stage.onlooker.forwards != forwards or any(canary.enabled for canary in stage.onlooker.canaries):
            raise Nonconforming("hooks", "a Canary goes on after canary_uninstall: call close of each one there")

    def test_a_canary_guards_the_pool(self) -> None:
        """The plugin installs, and builds a Canary where the engine makes its pool. Each forward is checked, recorded
        and ended."""
        with self._stage() as stage:
            self._serve(stage, self._apart(3))
            forwards = sum(canary.forwards for canary in stage.canaries)
            if not stage.onlooker.forwards:
                self._fail_unseen(stage)
            if not stage.onlooker.tables:
                raise Nonconforming("BatchAdapter", "BatchView.tables is empty: name a SlotTable for each region")
            if stage.onlooker.stored < stage.onlooker.forwards:
                raise Nonconforming(
                    "hooks",
                    f"{stage.onlooker.forwards} forwards were checked and {stage.onlooker.stored} recorded: call "
                    "canary.step.after (or step.run) after each forward",
                )
            if not stage.counter("checked_forwards"):
                raise Nonconforming(
                    "hooks", f"{forwards} forwards ran and no counter was read: call canary.step.end after each forward"
                )

    def test_installing_twice_changes_nothing(self) -> None:
        """`canary_install` may be called again: each forward is still checked once."""
        with self._stage() as once:
            self._serve(once, self._apart(3))
            forwards = once.onlooker.forwards
        with self._stage(installs=2) as twice:
            self._serve(twice, self._apart(3))
            if len(twice.canaries) != len(once.canaries) or twice.onlooker.forwards != forwards:
                raise Nonconforming(
                    "hooks",
                    f"installed twice, the plugin built {len(twice.canaries)} Canaries and checked "
                    f"{twice.onlooker.forwards} forwards, installed once {len(once.canaries)} and {forwards}: "
                    "canary_install must do nothing where it is installed already",
                )

    def test_views_tell_what_is_computed(self) -> None:
        """Every new token of every request is in a view, at its position, with its request's name and own tokens."""
        with self._stage() as stage:
            self._serve(stage, self._apart(CLEAN_REQUESTS // 2))
            if not stage.onlooker.forwards:
                self._fail_unseen(stage)
            # No two of them begin alike, so there is nothing to reuse.
            require_truth(stage, reuses=False)

    def test_every_changed_byte_is_described(self) -> None:
        """What a forward changes in the engine's memory is what the view says is written, byte by byte, in every
        source; and it changes between the check and the record."""
        with self._stage() as stage:
            fill(stage.session)
            with Footprints(stage) as footprints:
                self._serve(stage, self._apart(3, new_tokens=9))
            footprints.require_whole()
            # Slots are used again now, and may get what they held.
            with Footprints(stage, strict=False) as footprints:
                self._serve(stage, self._apart(CLEAN_REQUESTS))
            footprints.require_whole()

    def test_all_memory_is_covered(self) -> None:
        """The regions and what the adapter leaves out with a reason are all of the engine's KV memory."""
        with self._stage() as stage:
            self._serve(stage, self._apart(1))
            require_coverage(stage)

    def test_clean_traffic_is_silent(self) -> None:
        """Traffic of all lengths raises nothing under the strictest settings, and all of it is checked."""
        with self._stage() as stage:
            self._serve(stage, self._apart(CLEAN_REQUESTS))
            self._serve(stage, [Ask(f"{a.name}-b", a.tokens, a.new_tokens) for a in self._alike(CLEAN_REQUESTS)])
            stage.require_silence("clean traffic")
            for counter in ("checked_slots", "checked_bytes", "recorded_slots", "recorded_bytes"):
                if not stage.counter(counter):
                    raise Nonconforming(
                        "BatchAdapter",
                        f"{counter} is 0 after {2 * CLEAN_REQUESTS} requests: views "
                        "name no tables, no lengths or no slots",
                    )

    def test_answers_stay_the_same(self) -> None:
        """The engine answers alike with and without the plugin."""
        self._silent(lambda drive: self._serve(drive, self._apart(CLEAN_REQUESTS // 2)), "clean traffic", reuse=False)

    def test_flipped_bits_are_named(self) -> None:
        """A bit that is flipped in the engine's own memory is told with the layer, half, request and position."""
        with self._stage() as stage:
            first, other = self._apart(2, new_tokens=ANSWERED + 3 * self.layers * len(self.halves))
            stage.submit(first, other)
            stage.step_until(first.name, ANSWERED)
            stage.require_silence("two requests")
            places = [(layer, half) for layer in range(self.layers) for half in self.halves]
            for n, (layer, half) in enumerate(places):
                position = n % (len(first.tokens) + 1)
                self._poke(stage, Poke(layer, half, first.name, position))

    def test_faults_are_found(self) -> None:
        """Every fault that Canary can inject is found, in every region, those about bytes in every source."""
        with self._stage() as stage:
            self._serve(stage, self._apart(1))
            regions = [region for canary in stage.canaries for region in canary.regions.values()]
        specs = [
            FaultSpec(fault=name, warmup=4, probability=0.5, region=region.name, source=source)  # type: ignore[arg-type]
            for name in self.faults
            for region in regions
            for source in ([s.name for s in region.sources] if name in _OF_BYTES else [None])
        ]
        for spec in specs:
            self._find(spec)

    # What the engine's abilities ask of it

    @needs("raise")
    def test_raise_mode_stops_the_engine(self) -> None:
        """In raise mode a finding reaches whoever runs the engine, as `ViolationError`."""
        with self._stage(mode="raise") as stage:
            ask = self._running(stage, new_tokens=12)
            _ = stage.canaries  # in raise mode a plugin that can't attach may be silent
            stage.session.poke(0, self.halves[0], ask.name, 0)
            try:
                for _ in range(4):
                    stage.step()
            except ViolationError:
                return
            raise Nonconforming(
                "hooks",
                "in raise mode a flipped bit did not stop the engine: let ViolationError pass, which "
                "canary.step.end raises",
            )

    @needs("padding")
    def test_padding_is_not_taken_for_requests(self) -> None:
        """Rows of padding are checked as nothing, and what they write is described as the null slot's."""
        with self._stage() as stage:
            fill(stage.session)
            with Footprints(stage, strict=False) as footprints:
                for count in (1, 2, 3, 5):
                    self._serve(stage, [Ask(f"{a.name}-{count}", a.tokens, a.new_tokens) for a in self._apart(count)])
            footprints.require_whole()
            stage.require_silence("padded batches")

    @needs("slot_mapping")
    def test_a_misplaced_write_is_named(self) -> None:
        """A token that goes to another slot than the table says is told, with its request's name."""
        with self._stage() as stage:
            ask = self._running(stage, new_tokens=12)
            stage.session.misplace_write(ask.name)
            found = self._await(stage, lambda v: v.kind is Kind.WRITE_SLOT)
            if found is None:
                raise Nonconforming(
                    "BatchAdapter",
                    f"a write to a wrong slot was not found{found_instead(stage)}: give SlotTable.write_slots, "
                    "the engine's own list of slots that it writes, which is compared with the table",
                )
            self._need_name(found, found.request, ask.name)

    @needs("lifetime")
    def test_slots_given_back_too_early_are_found(self) -> None:
        """Slots that the allocator gets back while their request goes on are told, with the request's name."""
        with self._stage() as stage:
            ask = self._running(stage, new_tokens=12)
            parked = stage.told("park")
            stage.session.release_running(ask.name)
            found = self._await(stage, _too_early)
            kept = stage.told("park") > parked
            if found is None and kept and "evict" in self.abilities:
                # Nothing is wrong with slots that are kept, until they are not any more.
                stage.session.evict()
                found = self._await(stage, _too_early)
            if found is None and kept:
                raise Nonconforming(
                    "session",
                    "release_running gave back only slots that the prefix cache keeps, and was told as park, which is "
                    "no fault: give back a slot, too, that the cache does not have"
                    + ("" if "evict" in self.abilities else ", or declare evict"),
                )
            if found is None:
                raise Nonconforming(
                    "slot events",
                    "slots of a running request were given back to the engine's allocator, and nothing "
                    f"was found{found_instead(stage)}: tell canary.slots.free where the engine frees (if "
                    "release_running has given anything back that the prefix cache does not keep)",
                )
            self._need_name(found, found.request, ask.name)

    @needs("prefix_cache")
    def test_prefix_hits_are_silent(self) -> None:
        """Requests that begin like others reuse their slots: nothing is found, and a flip there names who wrote it."""

        def act(drive: Drive) -> None:
            self._serve(drive, self._alike(CLEAN_REQUESTS))
            self._serve(drive, [Ask(f"{a.name}-again", a.tokens, a.new_tokens) for a in self._alike(4)])

        self._silent(act, "prompts that begin alike")
        with self._stage() as stage:
            first, *_ = self._alike(1, new_tokens=4)
            self._serve(stage, [first])
            second = Ask("hit", first.tokens, ANSWERED + 9)
            stage.submit(second)
            stage.step_until(second.name, ANSWERED)
            self._poke(stage, Poke(0, self.halves[-1], second.name, 0, writer=first.name))

    @needs("park")
    def test_slots_released_twice_are_found(self) -> None:
        """What the prefix cache keeps and nobody holds is not released again unnoticed."""
        self._break_parked(
            lambda stage, name: stage.session.release_again(name),
            (Kind.DOUBLE_FREE,),
            "slots that the prefix cache keeps were released again",
            "tell canary.slots.park, not free, where the last request lets go of cached slots, and again where they "
            "are let go of although nobody holds them: the engine's count may be below 0 then",
        )

    @needs("park")
    def test_slots_handed_out_before_eviction_are_found(self) -> None:
        """What the prefix cache keeps is not handed out before it is evicted."""
        self._break_parked(
            lambda stage, name: stage.session.hand_out_cached(),
            (Kind.DOUBLE_ALLOC,),
            "slots that the prefix cache keeps were handed out without eviction",
            "tell canary.slots.alloc where the allocator hands out, and evict only where the prefix cache evicts",
        )

    @needs("evict")
    def test_eviction_is_silent(self) -> None:
        """Slots that the prefix cache gave up are written by others, and the prompts computed again."""

        def act(drive: Drive) -> None:
            for turn in range(3):
                asks = (*self._alike(4), *self._apart(3))
                self._serve(drive, [Ask(f"{a.name}-{turn}-{i}", a.tokens, a.new_tokens) for i, a in enumerate(asks)])
                drive.session.evict()

        self._silent(act, "eviction", part="slot events")

    @needs("preempt")
    def test_preemption_is_silent(self) -> None:
        """A request that loses its slots is computed again."""

        def act(drive: Drive) -> None:
            first, other = self._apart(2, new_tokens=8)
            drive.submit(first, other)
            drive.step_until(first.name, ANSWERED)
            drive.session.preempt(first.name)
            drive.finish()

        self._silent(act, "preemption", part="slot events")

    @needs("fork")
    def test_forks_are_silent(self) -> None:
        """Requests of all lengths go on as two each; a flip in what only a child has names it, and a flip in what was
        copied is found."""

        def act(drive: Drive) -> None:
            for first in (2, 2 + FORKS):
                self._fork_all(drive, first)
                drive.finish()

        self._silent(act, "a fork", part="slot events")
        copied: tuple[Culprit, str] = (
            "slot events",
            "tell canary.slots.copy of all slots that a fork copies, neither forget nor clear",
        )
        with self._stage() as stage:
            children = self._fork_all(stage, 2)
            length = {name: len(stage.asks[name].tokens) + len(stage.session.answer(name)) for name in children}
            stage.step()
            for name in children:
                parent = name.removesuffix("-child")
                self._poke(stage, Poke(0, self.halves[-1], name, length[name] - 2, parent, copied))
                # An engine may exchange a block that became full for the parent's, which holds the same.
                own = name if name == children[0] else parent
                self._poke(stage, Poke(0, self.halves[0], name, length[name] - 1, own))

    @needs("roll_back")
    def test_roll_backs_are_silent(self) -> None:
        """One to several tokens are dropped, at all places of a page, and computed again in the same slots."""

        def act(drive: Drive) -> None:
            asks = self._by_length(4, "roll back")
            drive.submit(*asks)
            for dropped in range(1, MOST_DROPPED + 1):
                for ask in asks:
                    drive.step_until(ask.name, MOST_DROPPED + dropped % 2)
                    drive.session.roll_back(ask.name, dropped)
            drive.finish()

        self._silent(act, "a roll-back", part="slot events")


def _too_early(violation: Violation) -> bool:
    return violation.kind in (Kind.FREED, Kind.WRITE_AFTER_FREE)
