"""`FaultInjector`: a plugin that injects faults, and checks that each could be seen."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

from canary_core.batch import BatchView
from canary_core.config import CanaryConfig
from canary_core.config.faults import FaultSpec
from canary_core.events import Event
from canary_core.plugins.hookspecs import hookimpl
from canary_core.records import POSITION, STEP_WRITTEN, UNPARKED, State
from canary_core.runtime.streams import capturing
from canary_kit.faults.catalogue import FAULTS, FaultMoment
from canary_kit.faults.scene import Armed, Injection, Pending, Scene

if TYPE_CHECKING:
    from canary_core.guard.canary import Canary

INJECTOR = "fault injector"
"""Name of the plugin in a manager."""


class FaultInjector:
    """A plugin that injects ``specs``; `ConfiguredFaults` registers it for `CanaryConfig.faults`. The same seed, specs
    and traffic give the same faults; each spec draws from a stream of its own.

    ``injections`` are those done so far, in order, each also reported as a ``fault_injected`` event. A fault without
    anything to break tries again in the next forward; so does one whose slot is dropped by the engine before another
    forward begins (``fault_moot``): nobody could read it any more. A fault never injected is reported as
    ``fault_not_injected`` when the Canary is closed.
    """

    def __init__(self, specs: list[FaultSpec], seed: int = 0) -> None:
        self.injections: list[Injection] = []
        self._armed = [
            Armed(s, random.Random(f"{seed}/{i}/{s.fault}"), before_check=FAULTS[s.fault].moment == "pre_forward")
            for i, s in enumerate(specs)
        ]
        self._pending: list[Pending] = []
        self._unseen: list[_Unseen] = []

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> "FaultInjector":
        """From the syntax of ``CANARY_FAULTS``. Raises `ConfigError` naming the known faults and keys."""
        return cls(FaultSpec.parse_all(text), seed)

    @hookimpl
    def canary_attached(self, canary: "Canary") -> None:
        """Reports faults without a place in the pool."""
        for armed in self._of(canary):
            spec = armed.spec
            regions = [s for s in canary.states.values() if spec.region in (None, s.region.name)]
            known = sorted({s.name for r in regions for s in r.sources})
            if not regions or (spec.source is not None and spec.source not in known):
                reason = (
                    f"there is no source {spec.source!r}; the guarded ones are {', '.join(known) or 'none'}"
                    if regions
                    else f"there is no region {spec.region!r}; the regions are {', '.join(canary.states)}"
                )
                canary.tell(Event("fault_not_injected", "warning", {"fault": spec.fault, "reason": reason}))

    @hookimpl
    def canary_pre_forward(self, canary: "Canary", batch: BatchView) -> None:
        """Injects damage to be found by a forward."""
        if _capturing(canary):
            return
        # Left over where a forward raised: what was spared from the write is long stale, a table entry may still stand.
        self._restore(canary, lasting=True)
        self._forget_moot(canary, "the slot was dropped before another forward began")
        self._inject("pre_forward", canary, batch)

    @hookimpl
    def canary_post_forward(self, canary: "Canary", batch: BatchView) -> None:
        """Undoes damage meant for one forward, and injects errors within it."""
        if _capturing(canary):
            return
        self._restore(canary, lasting=False)
        self._inject("post_forward", canary, batch)

    @hookimpl
    def canary_recorded(self, canary: "Canary", batch: BatchView) -> None:
        """Injects damage to slots after their record."""
        if not _capturing(canary):
            self._inject("recorded", canary, batch)

    @hookimpl
    def canary_detached(self, canary: "Canary") -> None:
        """Reports faults never injected, so that a self-test without a fault isn't taken for a passed one."""
        self._restore(canary, lasting=True)
        self._forget_moot(canary, "no other forward followed", all_of_them=True)
        for armed in self._of(canary):
            if armed.injected == 0 and armed.spec.probability > 0:
                reason = (
                    f"no candidate in {armed.tries} forwards"
                    if armed.tries
                    else f"not due in {canary.forwards} forwards; check warmup and probability"
                )
                canary.tell(Event("fault_not_injected", "warning", {"fault": armed.spec.fault, "reason": reason}))

    def _of(self, canary: "Canary") -> list[Armed]:
        """Faults meant for this process."""
        config = canary.config
        return [
            armed
            for armed in self._armed
            if armed.spec.rank in (None, config.rank) and armed.spec.replica in (None, config.replica)
        ]

    def _inject(self, moment: FaultMoment, canary: "Canary", batch: BatchView) -> None:
        for armed in self._of(canary):
            fault = FAULTS[armed.spec.fault]
            if fault.moment != moment or not armed.due(canary.forwards):
                continue
            names = [n for n in batch.tables if n in canary.states and armed.spec.region in (None, n)]
            armed.random.shuffle(names)
            for name in names:
                scene = Scene(canary, batch, name, armed)
                injection = fault.inject(scene)
                if injection is None:
                    continue
                armed.done()
                self._pending += scene.pending
                self.injections.append(injection)
                if moment == "recorded":
                    self._unseen.append(_Unseen(canary, armed, injection))
                told = {**injection.fields(), "what": FAULTS[injection.fault].what}
                canary.tell(Event("fault_injected", "warning", told))
                break
            else:
                armed.tries += 1

    def _forget_moot(self, canary: "Canary", reason: str, all_of_them: bool = False) -> None:
        ours = [u for u in self._unseen if u.canary is canary]
        self._unseen = [u for u in self._unseen if u.canary is not canary]
        for unseen in ours:
            if all_of_them or not unseen.stands():
                self.injections.remove(unseen.injection)
                unseen.armed.injected -= 1
                unseen.armed.tries += 1
                canary.tell(Event("fault_moot", "info", {"reason": reason, **unseen.injection.fields()}))

    def _restore(self, canary: "Canary", lasting: bool) -> None:
        ours = [p for p in self._pending if p.canary is canary]
        self._pending = [p for p in self._pending if p.canary is not canary]
        for pending in reversed(ours):
            if pending.lasting or not lasting:
                pending.restore()


class ConfiguredFaults:
    """Built-in plugin that registers the `FaultInjector` of `CanaryConfig.faults`, if there are any."""

    @hookimpl
    def canary_configure(self, config: CanaryConfig, manager: pluggy.PluginManager) -> None:
        """Registers the injector, once in each manager."""
        if config.mode != "off" and config.faults.strip() and not manager.has_plugin(INJECTOR):
            manager.register(FaultInjector.parse(config.faults, config.seed), name=INJECTOR)


@dataclass(frozen=True, slots=True)
class _Unseen:
    """A fault not yet exposed to any check."""

    canary: "Canary"
    armed: Armed
    injection: Injection

    def stands(self) -> bool:
        """Whether the slots still hold the damage."""
        state = self.canary.states[self.injection.region]
        records = state.records[list(self.injection.slots)]
        written = records[:, POSITION] & UNPARKED == State.WRITTEN
        return bool((written & (records[:, STEP_WRITTEN] == self.injection.step)).all())


def _capturing(canary: "Canary") -> bool:
    """Whether a graph is being captured: faults need host reads, forbidden there."""
    return capturing(next(iter(canary.regions.values())).device)
