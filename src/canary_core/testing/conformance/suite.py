"""`PluginConformance`: what every plugin of an engine must pass."""

import contextlib
import functools
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from canary_core.errors import CanaryError, ViolationError
from canary_core.faults.catalogue import FAULTS
from canary_core.faults.injector import FaultInjector
from canary_core.faults.spec import FaultSpec
from canary_core.records import Kind
from canary_core.testing.conformance import traffic
from canary_core.testing.conformance.footprints import Footprints, require_coverage
from canary_core.testing.conformance.problems import Nonconforming, Part, require_silence
from canary_core.testing.conformance.session import ABILITIES, Ability, EngineSession
from canary_core.testing.conformance.stage import MOST_STEPS, Ask, Drive, Stage, fill, installed, target_of
from canary_core.testing.conformance.truth import require_truth
from canary_core.testing.conformance.witness import Witness
from canary_core.testing.findings import Findings
from canary_core.testing.quiet import one_thread, unheard
from canary_core.testing.settings import strict_config
from canary_core.violation import Violation

CLEAN_REQUESTS = 20
FAULT_REQUESTS = 12
ANSWERED = 3
"""Tokens that a request has answered when something is done to it."""

Act = Callable[[Drive], None]
"""Serves requests on an engine, guarded or not."""

_OF_BYTES = ("real_kv_used", "real_kv_unused_cache", "real_kv_post_forward", "lost_write", "stray_write")
"""Faults that are about one source."""


def needs(ability: Ability) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """A test that is run where ``ability`` is declared, and else skipped."""

    def declare(test: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(test)
        def checked(suite: "PluginConformance") -> None:
            suite._need(ability)
            test(suite)

        checked.ability = ability  # type: ignore[attr-defined]
        return checked

    return declare


class PluginConformance:
    """Subclass it, say which plugin and what its engine can do, and give a `session`; pytest runs the rest::

        class TestToy(PluginConformance):
            plugin = "toy"
            layers, halves = 2, ("k", "v")
            abilities = frozenset({"lifetime", "padding", "prefix_cache"})

            def session(self) -> EngineSession:
                return ToySession()

    A test that fails says which part of the plugin is wrong, as `Nonconforming`. What is not declared in ``abilities``
    is skipped, and shows in the support matrix. Nothing here uses the adapter's view of the engine but to judge it.
    """

    plugin: object = ""
    """Name of its entry point, or the object with the hooks."""
    layers: int = 1
    """Layers whose KV a `EngineSession.poke` can reach."""
    halves: Sequence[str] = ("k", "v")
    """What a layer keeps of a token, as `KVSource.half` names it."""
    abilities: frozenset[Ability] = frozenset()
    """See `Ability`."""
    vocabulary: int = 128
    """Prompts are made of token ids from 1 to this less one."""
    longest_prompt: int = 40
    """Tokens of the longest prompt: enough for several pages."""
    faults: Sequence[str] = tuple(FAULTS)
    """Names of the faults that are injected (see `FaultSpec`): all, unless the engine hides one and the plugin's
    documentation says so."""
    engine_package: str = ""
    """Name of the engine's package, whose functions `canary_uninstall` must restore."""

    def session(self) -> EngineSession:
        """A fresh small engine with an empty pool, under whatever is installed."""
        raise NotImplementedError(f"{type(self).__name__}.session must give an EngineSession for the engine")

    # What every plugin must do

    @needs("uninstall")
    def test_uninstalling_restores_the_engine(self) -> None:
        """After `canary_uninstall` the engine's functions are its own again, and its forwards run unguarded."""
        # The first of all: what it leaves behind would be taken for the engine's own by the others.
        self._load()
        before = _functions(self.engine_package)
        self._need_functions(before)
        with self._stage() as stage:
            self._serve(stage, self._apart(1))
        changed = _changed(before, _functions(self.engine_package))
        if changed:
            raise Nonconforming(
                "hooks",
                f"after canary_uninstall these are not the engine's own: {', '.join(changed)}; put back what "
                "canary_install replaced (canary_core.Patches does)",
            )
        forwards = stage.witness.forwards
        self._serve_bare()
        if stage.witness.forwards != forwards or any(canary.enabled for canary in stage.witness.canaries):
            raise Nonconforming("hooks", "a Canary goes on after canary_uninstall: call close of each one there")

    def test_a_canary_guards_the_pool(self) -> None:
        """The plugin installs, and builds a Canary where the engine makes its pool. Each forward is checked, recorded
        and ended."""
        with self._stage() as stage:
            self._serve(stage, self._apart(3))
            forwards = sum(canary.forwards for canary in stage.canaries)
            if not stage.witness.forwards:
                self._fail_unseen(stage, forwards)
            if not stage.witness.tables:
                raise Nonconforming("BatchAdapter", "BatchView.tables is empty: name a SlotTable for each region")
            if stage.witness.stored < stage.witness.forwards:
                raise Nonconforming(
                    "hooks",
                    f"{stage.witness.forwards} forwards were checked and {stage.witness.stored} recorded: call "
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
            forwards = once.witness.forwards
        with self._stage(installs=2) as twice:
            self._serve(twice, self._apart(3))
            if len(twice.canaries) != len(once.canaries) or twice.witness.forwards != forwards:
                raise Nonconforming(
                    "hooks",
                    f"installed twice, the plugin built {len(twice.canaries)} Canaries and checked "
                    f"{twice.witness.forwards} forwards, installed once {len(once.canaries)} and {forwards}: "
                    "canary_install must do nothing where it is installed already",
                )

    def test_views_tell_what_is_computed(self) -> None:
        """Every new token of every request is in a view, at its position, with its request's name and own tokens."""
        with self._stage() as stage:
            self._serve(stage, self._apart(CLEAN_REQUESTS // 2))
            if not stage.witness.forwards:
                self._fail_unseen(stage, 0)
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
            stage.drain()
            require_silence(stage.violations, stage.findings.events, "clean traffic")
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
            require_silence(stage.violations, stage.findings.events, "two requests")
            places = [(layer, half) for layer in range(self.layers) for half in self.halves]
            for n, (layer, half) in enumerate(places):
                position = n % (len(first.tokens) + 1)
                self._poke(stage, (layer, half), first.name, position)

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
            stage.drain()
            require_silence(stage.violations, stage.findings.events, "padded batches")

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
                    f"a write to a wrong slot was not found{_but(stage)}: give SlotTable.write_slots, "
                    "the engine's own list of slots that it writes, which is compared with the table",
                )
            self._need_name(found, found.request, ask.name)

    @needs("lifetime")
    def test_slots_given_back_too_early_are_found(self) -> None:
        """Slots that the allocator gets back while their request goes on are told, with the request's name."""
        with self._stage() as stage:
            ask = self._running(stage, new_tokens=12)
            stage.session.release_running(ask.name)
            found = self._await(stage, lambda v: v.kind in (Kind.FREED, Kind.WRITE_AFTER_FREE))
            if found is None:
                raise Nonconforming(
                    "slot events",
                    "slots of a running request were given back to the engine's allocator, and nothing "
                    f"was found{_but(stage)}: tell canary.slots.free where the engine frees",
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
            self._poke(stage, (0, self.halves[-1]), second.name, 0, writer=first.name)

    @needs("park")
    def test_slots_released_twice_are_found(self) -> None:
        """What the prefix cache keeps and nobody holds is not released again unnoticed."""
        self._break_parked(
            lambda stage, name: stage.session.release_again(name),
            (Kind.DOUBLE_FREE,),
            "slots that the prefix cache keeps were released again",
            "tell canary.slots.park, not free, where the last request lets go of cached slots",
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
        """Two requests go on from what one had; a flip in what only the child has names it."""

        def act(drive: Drive) -> None:
            self._fork(drive)
            drive.finish()

        self._silent(act, "a fork", part="slot events")
        with self._stage() as stage:
            child = self._fork(stage)
            stage.step()
            stage.step()
            ask = stage.asks[child]
            position = len(ask.tokens) + len(stage.session.answer(child)) - 2
            self._poke(stage, (0, self.halves[0]), child, position)

    @needs("roll_back")
    def test_roll_backs_are_silent(self) -> None:
        """Tokens that were dropped are computed again in the same slots."""

        def act(drive: Drive) -> None:
            first, other = self._apart(2, new_tokens=10)
            drive.submit(first, other)
            for answered in (ANSWERED, ANSWERED + 2):
                drive.step_until(first.name, answered)
                drive.session.roll_back(first.name, 2)
            drive.finish()

        self._silent(act, "a roll-back", part="slot events")

    # How it is done

    @contextlib.contextmanager
    def _stage(self, *plugins: object, installs: int = 1, **settings: Any) -> Iterator[Stage]:
        """An engine under the plugin with strict settings. The plugin is uninstalled after it, and the session
        closed."""
        witness, findings = Witness(), Findings()
        config = strict_config(**settings)
        target = target_of(self.plugin)
        self._load()
        with unheard(), one_thread(), contextlib.ExitStack() as stack:
            for listeners in [(witness, findings, *plugins), *[()] * (installs - 1)]:
                stack.enter_context(installed(target, config, *listeners))
            try:
                session = self.session()
            except CanaryError as error:
                what = f"in {config.mode} mode the engine did not start, {type(error).__name__}: {error}"
                raise Nonconforming("PoolAdapter", what) from error
            stack.callback(session.close)
            yield Stage(session, witness, findings)

    def _serve(self, drive: Drive, asks: Sequence[Ask]) -> None:
        drive.submit(*asks)
        drive.finish()
        for ask in asks:
            got = len(drive.session.answer(ask.name))
            if got != ask.new_tokens:
                raise Nonconforming("session", f"{ask.name} was to be answered with {ask.new_tokens} tokens, got {got}")

    def _load(self) -> None:
        """Once a process: what sessions share is loaded, and what the engine imports late is imported, without the
        plugin. It is not to be taken for what a session does under it."""
        if type(self) not in _LOADED:
            self._serve_bare()
            _LOADED.add(type(self))

    def _serve_bare(self) -> None:
        """One request on an engine of its own, without the plugin."""
        with contextlib.closing(self.session()) as session:
            self._serve(Drive(session), self._apart(1))

    def _silent(self, act: Act, doing: str, reuse: bool = True, part: Part | None = None) -> None:
        """What ``act`` does gives the same answers with and without the plugin, raises nothing, is described byte by
        byte and told truly. ``reuse``: requests may begin with slots that others wrote. ``part``: what is to blame for
        findings, where it is known."""
        with contextlib.closing(self.session()) as session:
            bare = Drive(session)
            act(bare)
            expected = bare.answers()
        with self._stage() as stage:
            with Footprints(stage, strict=False) as footprints:
                act(stage)
            stage.drain()
            require_silence(stage.violations, stage.findings.events, doing, part)
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

    def _poke(self, stage: Stage, source: tuple[int, str], request: str, position: int, writer: str = "") -> None:
        """Flips a bit in ``source``, a layer and a half, and requires that just this is told. ``writer``: who wrote it,
        if not ``request``."""
        layer, half = source
        before = len(stage.violations)
        stage.session.poke(layer, half, request, position)
        place = f"a bit of {half} of layer {layer} was flipped at position {position} of {request}"
        if self._await(stage, lambda v: True, before) is None:
            raise Nonconforming(
                "PoolAdapter",
                f"{place}, and nothing was found: is this layer and half among the regions' sources, do they point at "
                "the engine's own memory, not at a copy, and is canary.step.end called?",
            )
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
        self._need_name(first, first.stored_request, writer or request)

    def _find(self, spec: FaultSpec) -> None:
        injector = FaultInjector([spec], seed=1)
        what = f"fault {spec.fault} in {spec.region}" + (f", {spec.source}" if spec.source else "")
        with self._stage(injector) as stage:
            stage.submit(*self._alike(FAULT_REQUESTS))
            for _ in range(MOST_STEPS):
                # What comes after the finding is another test's: an engine may take long for all of it.
                if _explained(injector, stage) or not stage.step():
                    break
            stage.drain()
            if not injector.injections:
                reasons = [str(event.fields["reason"]) for event in stage.findings.told("fault_not_injected")]
                raise Nonconforming(
                    "BatchAdapter",
                    f"{what} found nothing to break in {stage.witness.forwards} "
                    f"forwards: {'; '.join(reasons) or 'views name no slots'}{_NO_TRUTH[spec.fault]}",
                )
            (injection,) = injector.injections
            if any(v.step < injection.step for v in stage.violations):
                require_silence(stage.violations, (), f"before {what}")
            if not _explained(injector, stage):
                raise Nonconforming(
                    "hooks",
                    f"{what} was not found{_but(stage)}: is each forward checked before it "
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
                raise Nonconforming("slot events", f"{what}, and nothing was found{_but(stage)}: {advice}")

    def _running(self, drive: Drive, new_tokens: int) -> Ask:
        """A request alone, which has `ANSWERED` tokens and goes on."""
        (ask,) = self._apart(1, new_tokens)
        drive.submit(ask)
        drive.step_until(ask.name, ANSWERED)
        return ask

    def _fork(self, drive: Drive) -> str:
        ask = self._running(drive, new_tokens=10)
        drive.fork(ask.name, "child")
        return "child"

    def _await(self, stage: Stage, wanted: Callable[[Violation], bool], since: int = 0) -> Violation | None:
        """The first finding like that, told without anything but further steps."""
        for _ in range(4):
            stage.step()
            for v in stage.violations[since:]:
                if wanted(v):
                    return v
        return None

    def _need(self, ability: Ability) -> None:
        unknown = sorted(self.abilities - set(ABILITIES))
        if unknown:
            raise Nonconforming("session", f"unknown abilities {unknown}; there are {', '.join(ABILITIES)}")
        if ability not in self.abilities:
            raise unittest.SkipTest(f"ability {ability!r} is not declared")

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

    def _fail_unseen(self, stage: Stage, forwards: int) -> None:
        raise Nonconforming(
            "BatchAdapter" if not forwards else "hooks",
            "the engine served requests and no forward was checked: the view of each forward is None, or nothing calls "
            "canary.step.run or canary.step.before" + stage.troubles(),
        )

    def _apart(self, count: int, new_tokens: int = 6) -> tuple[Ask, ...]:
        return traffic.apart(count, self.longest_prompt, self.vocabulary, new_tokens)

    def _alike(self, count: int, new_tokens: int = 6) -> tuple[Ask, ...]:
        return traffic.alike(count, self.longest_prompt, self.vocabulary, new_tokens)


_LOADED: set[type[PluginConformance]] = set()
"""Suites that have had a session in this process."""
_NO_TRUTH = dict.fromkeys(FAULTS, "") | {
    "next_token_swap": "; give expected_tokens, the requests' own tokens, else a swapped token can't be seen"
}


def _explained(injector: FaultInjector, stage: Stage) -> bool:
    """Whether a fault was injected, and found."""
    return any(injection.explains(v) for injection in injector.injections for v in stage.violations)


def _but(stage: Stage) -> str:
    kinds = sorted({v.kind.name.lower() for v in stage.violations})
    return f" (but {', '.join(kinds)})" if kinds else ""


def _functions(package: str) -> dict[str, object]:
    """Every function and class of a package's imported modules, and every attribute of its classes, by full name."""
    found: dict[str, object] = {}
    modules = [m for name, m in sys.modules.items() if package and (name == package or name.startswith(f"{package}."))]
    for module in modules:
        for name, value in list(vars(module).items()):
            if callable(value):
                found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                for own, inner in vars(value).items():
                    if callable(inner) or isinstance(inner, (staticmethod, classmethod, property)):
                        found[f"{module.__name__}.{name}.{own}"] = inner
    return found


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """What is another object, gone, or new in a class. What is new in a module, an engine has imported late."""
    other = {name for name, value in before.items() if after.get(name) is not value}
    return sorted(other | {name for name in after if name not in before and name.rpartition(".")[0] in before})
