"""`Trials`: puts an engine under a plugin for the tests of `PluginConformance`, and judges the results."""

import contextlib
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canary_core.config.faults import FaultSpec
from canary_core.errors import CanaryError, error_text
from canary_core.records import Kind
from canary_core.violation import Violation
from canary_kit.conformance import traffic
from canary_kit.conformance.footprints import Footprints
from canary_kit.conformance.onlooker import Onlooker
from canary_kit.conformance.problems import Culprit, Nonconforming, require_silence
from canary_kit.conformance.session import ABILITIES, Ability, EngineSession
from canary_kit.conformance.stage import MOST_STEPS, Ask, Drive, Stage, installed, target_of
from canary_kit.conformance.truth import require_truth
from canary_kit.faults.catalogue import FAULTS
from canary_kit.faults.injector import FaultInjector
from canary_kit.findings import Findings
from canary_kit.quiet import one_thread, unheard
from canary_kit.settings import strict_config

FAULT_REQUESTS = 12
FORKS = 4
"""Requests forked, or rolled back, at a time: as many as have their children beside them in a small engine."""
MOST_DROPPED = 5
"""Tokens of the longest roll back."""
REUSE_WAVES = 6
"""Waves of requests until slots are written a second time."""
LEAST_PROMPT, LEAST_VOCABULARY = 20, 48
"""Tokens of the longest prompt, and token ids, without which some tests would try nothing."""
ANSWERED = 3
"""Tokens answered by a request before a test interferes."""

Act = Callable[[Drive], None]
"""Serves requests on an engine, guarded or not."""


@dataclass(frozen=True, slots=True)
class Poke:
    """A bit to flip in ``half`` of ``layer``. ``writer``: the slot's writer, if not ``request``. ``unseen``: the part
    to blame where nothing is found, and where to look in it."""

    layer: int
    half: str
    request: str
    position: int
    writer: str = ""
    unseen: tuple[Culprit, str] = (
        "PoolAdapter",
        "is this layer and half among the regions' sources, do they point at the engine's own memory, not at a copy, "
        "and is canary.step.end called?",
    )


class Trials:
    """Actions of tests on a plugin and its engine. `PluginConformance` has the facts about the engine."""

    plugin: object
    layers: int
    halves: Sequence[str]
    abilities: frozenset[Ability]
    lacking: Mapping[Ability, str]
    vocabulary: int
    longest_prompt: int
    roll_backs: Sequence[int]
    faults: Sequence[str]
    engine_package: str

    def session(self) -> EngineSession:
        """See `PluginConformance.session`."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _stage(self, *plugins: object, installs: int = 1, **settings: Any) -> Iterator[Stage]:
        """An engine under the plugin with strict settings. Afterwards the plugin is uninstalled, and the session
        closed."""
        onlooker, findings = Onlooker(), Findings()
        config = strict_config(**settings)
        target = target_of(self.plugin)
        self._load()
        with unheard(), one_thread(), contextlib.ExitStack() as stack:
            for listeners in [(onlooker, findings, *plugins), *[()] * (installs - 1)]:
                stack.enter_context(installed(target, config, *listeners))
            try:
                session = self.session()
            except CanaryError as error:
                what = f"in {config.mode} mode the engine did not start, {error_text(error)}"
                raise Nonconforming("PoolAdapter", what) from error
            stack.callback(session.close)
            yield Stage(session, onlooker, findings, self.longest_prompt)

    def _serve(self, drive: Drive, asks: Sequence[Ask]) -> None:
        drive.submit(*asks)
        drive.finish()
        for ask in asks:
            got = len(drive.session.answer(ask.name))
            if got != ask.new_tokens:
                raise Nonconforming("session", f"{ask.name} was to be answered with {ask.new_tokens} tokens, got {got}")

    def _load(self) -> None:
        """Once a process: loads everything common to sessions, late imports of the engine included, without the plugin,
        so that they do not count as a session's changes under it."""
        if type(self) not in _LOADED:
            self._serve_bare()
            _LOADED.add(type(self))

    def _serve_bare(self) -> None:
        """One request on an engine of its own, without the plugin."""
        with contextlib.closing(self.session()) as session:
            self._serve(Drive(session), self._apart(1))

    def _silent(self, act: Act, doing: str, reuse: bool = True, part: Culprit | None = None) -> None:
        """Requires that ``act`` gives the same answers with and without the plugin, raises nothing, and has views and
        events true to every byte. ``reuse``: requests may begin with slots written by others. ``part``: the part to
        blame for findings, where known."""
        with contextlib.closing(self.session()) as session:
            bare = Drive(session)
            act(bare)
            expected = bare.answers()
        with self._stage() as stage:
            with Footprints(stage, strict=False) as footprints:
                act(stage)
            stage.require_silence(doing, part)
            if stage.answers() != expected:
                name = next(name for name, answer in stage.answers().items() if answer != expected[name])
                raise Nonconforming(
                    "hooks",
                    f"{doing}: {name} is answered with {stage.answers()[name]} under Canary and with {expected[name]} "
                    "without: the plugin changes what the engine computes. It must not write to the engine's tensors, "
                    "lists or batches",
                )
            footprints.require_whole()
            require_truth(stage, reuses=reuse)

    def _poke(self, stage: Stage, flip: Poke) -> None:
        """Flips a bit, and requires exactly its finding."""
        layer, half, request, position = flip.layer, flip.half, flip.request, flip.position
        before = len(stage.violations)
        stage.session.poke(layer, half, request, position)
        place = f"a bit of {half} of layer {layer} was flipped at position {position} of {request}"
        if self._await(stage, lambda v: True, before) is None:
            part, advice = flip.unseen
            if part == "PoolAdapter" and stage.told("forget"):
                part, advice = "slot events", "canary.slots.forget was told; what it names is not judged any more"
            raise Nonconforming(part, f"{place}, and nothing was found: {advice}")
        found = stage.violations[before:]
        for v in found:
            if v.kind is not Kind.BYTES:
                raise Nonconforming("PoolAdapter", f"{place}, and told was: {v}")
            if (v.layer, v.half) != (layer, half):
                raise Nonconforming(
                    "PoolAdapter",
                    f"{place}, and told as {v.half} of layer {v.layer}: the names of the sources do not fit their "
                    f"memory (layers in another order, halves exchanged, or one counted twice). {v}",
                )
        first = found[0]
        group = self._group(stage, first)
        if first.position is not None and first.position != position // group:
            raise Nonconforming("BatchAdapter", f"{place}, and told at position {first.position}: {first}")
        self._need_name(first, first.stored_request, flip.writer or request)

    def _find(self, spec: FaultSpec) -> None:
        injector = FaultInjector([spec], seed=1)
        what = f"fault {spec.fault} in {spec.region}" + (f", {spec.source}" if spec.source else "")
        with self._stage(injector) as stage:
            for asks in self._waves(REUSE_WAVES if spec.fault == "lost_write" else 1):
                stage.submit(*asks)
                for _ in range(MOST_STEPS):
                    # What comes after the finding is another test's: an engine may take long for all of it.
                    if _explained(injector, stage) or not stage.step():
                        break
                if injector.injections:
                    break
            stage.drain()
            if not injector.injections:
                if spec.fault == "real_kv_unused_cache" and "park" not in self.abilities and stage.onlooker.forwards:
                    return  # each forward may read all that is in use, where no prefix cache keeps anything
                reasons = [str(event.fields["reason"]) for event in stage.findings.told("fault_not_injected")]
                raise Nonconforming(
                    "session" if spec.fault == "lost_write" and stage.onlooker.forwards else "BatchAdapter",
                    f"{what} found nothing to break in {stage.onlooker.forwards} "
                    f"forwards: {'; '.join(reasons) or _NOTHING[spec.fault]}",
                )
            (injection,) = injector.injections
            if any(v.step < injection.step for v in stage.violations):
                require_silence(stage.violations, (), f"before {what}")
            if not _explained(injector, stage):
                raise Nonconforming(
                    "hooks",
                    f"{what} was not found{found_instead(stage)}: is each forward checked before it "
                    "runs, and recorded after it?",
                )

    def _break_parked(self, act: Callable[[Stage, str], None], kinds: tuple[Kind, ...], what: str, advice: str) -> None:
        with self._stage() as stage:
            (ask,) = self._alike(1)
            self._serve(stage, [ask])
            act(stage, ask.name)
            # Events take effect with the next forward.
            others = [Ask(f"{a.name}-after", a.tokens, a.new_tokens) for a in self._apart(2)]
            stage.submit(*others)
            if self._await(stage, lambda v: v.kind in kinds) is None:
                raise Nonconforming("slot events", f"{what}, and nothing was found{found_instead(stage)}: {advice}")

    def _running(self, drive: Drive, new_tokens: int) -> Ask:
        """A request alone, with `ANSWERED` tokens, still running."""
        (ask,) = self._apart(1, new_tokens)
        drive.submit(ask)
        drive.step_until(ask.name, ANSWERED)
        return ask

    def _by_length(self, first: int, series: object) -> list[Ask]:
        """`FORKS` prompts whose lengths go up by one, from ``first`` tokens; other ones for another ``series``."""
        prompts = [traffic.prompt(first + n, self.vocabulary, (series, n)) for n in range(FORKS)]
        return [Ask(f"length-{len(p)}-{series}", p, ANSWERED + 9) for p in prompts]

    def _fork_all(self, drive: Drive, first: int) -> list[str]:
        """The names of children, each forked from one of `_by_length`."""
        asks = self._by_length(first, "fork")
        drive.submit(*asks)
        for ask in asks:
            drive.step_until(ask.name, ANSWERED)
        for ask in asks:
            drive.fork(ask.name, f"{ask.name}-child")
        return [f"{ask.name}-child" for ask in asks]

    def _await(self, stage: Stage, wanted: Callable[[Violation], bool], since: int = 0) -> Violation | None:
        """The first wanted finding of the next steps, None without one."""
        for _ in range(4):
            stage.step()
            for v in stage.violations[since:]:
                if wanted(v):
                    return v
        return None

    def _need(self, ability: Ability) -> None:
        unknown = sorted({*self.abilities, *self.lacking} - set(ABILITIES))
        if unknown:
            raise Nonconforming("session", f"unknown abilities {unknown}; there are {', '.join(ABILITIES)}")
        if both := sorted(self.abilities & self.lacking.keys()):
            raise Nonconforming("session", f"{both} are both in abilities and in lacking; take them out of one")
        if ability not in self.abilities:
            raise unittest.SkipTest(
                f"ability {ability!r} is not declared: {self.lacking.get(ability, 'the suite does not say why')}"
            )

    def _need_functions(self, functions: Mapping[str, object]) -> None:
        if not functions:
            raise Nonconforming(
                "session",
                f"no function of a package {self.engine_package!r} is imported; name the "
                "engine's package in engine_package",
            )

    def _need_name(self, violation: Violation, told: str | None, request: str) -> None:
        if told is None or request not in told:
            raise Nonconforming(
                "BatchAdapter",
                f"a finding about {request} names {told or 'nobody'}: writers must be canary.writers.id(name) of the "
                f"requests, in the rows' order. {violation}",
            )

    def _group(self, stage: Stage, violation: Violation) -> int:
        regions = [c.regions[violation.region] for c in stage.canaries if violation.region in c.regions]
        return regions[0].tokens_per_slot if regions else 1

    def _fail_unseen(self, stage: Stage) -> None:
        raise Nonconforming(
            stage.unseen_by(),
            "the engine served requests and no forward was checked: the view of each forward is None, or nothing calls "
            "canary.step.run or canary.step.before" + stage.troubles(),
        )

    def _need_room(self) -> None:
        if self.longest_prompt < LEAST_PROMPT or self.vocabulary < LEAST_VOCABULARY:
            raise Nonconforming(
                "session",
                f"longest_prompt must be at least {LEAST_PROMPT}, and vocabulary {LEAST_VOCABULARY}, for prompts that "
                f"begin alike and differ; got {self.longest_prompt} and {self.vocabulary}",
            )

    def _apart(self, count: int, new_tokens: int = 6) -> tuple[Ask, ...]:
        self._need_room()
        return traffic.apart(count, self.longest_prompt, self.vocabulary, new_tokens)

    def _waves(self, count: int) -> Iterator[tuple[Ask, ...]]:
        """Traffic with shared beginnings, then more with other tokens, for the slots of what has ended."""
        yield self._alike(FAULT_REQUESTS)
        for wave in range(1, count):
            yield tuple(
                Ask(f"{a.name}-{wave}", a.tokens[wave:] or a.tokens, a.new_tokens) for a in self._apart(FAULT_REQUESTS)
            )

    def _alike(self, count: int, new_tokens: int = 6) -> tuple[Ask, ...]:
        self._need_room()
        return traffic.alike(count, self.longest_prompt, self.vocabulary, new_tokens)


_LOADED: set[type[Trials]] = set()
"""Suites with an earlier session in this process."""
_NOTHING = dict.fromkeys(FAULTS, "views name no slots") | {
    "next_token_swap": "views name no slots; give expected_tokens, the requests' own tokens, else a swapped token "
    "can't be seen",
    "lost_write": "no slot was written twice, and the first write of a slot proves nothing in memory that the engine "
    "has not cleared; give the session's engine a smaller pool, so that slots come round, or a pool of zeros",
}
"""Why a fault found nothing to break, where the fault itself does not say."""


def _explained(injector: FaultInjector, stage: Stage) -> bool:
    """Whether a fault was injected, and found."""
    return any(injection.explains(v) for injection in injector.injections for v in stage.violations)


def found_instead(stage: Stage) -> str:
    """The kinds found, for a sentence about a missing one."""
    kinds = sorted({v.kind.name.lower() for v in stage.violations})
    return f" (but {', '.join(kinds)})" if kinds else ""
