"""`Footprints`: audits each forward of a stage, and the time between two."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.guard.canary import Canary
from canary_core.guard.coverage import Coverage
from canary_core.watchers.audit.footprint import FootprintAudit
from canary_kit.conformance.problems import SHOWN, Culprit, Nonconforming
from canary_kit.conformance.stage import Stage
from canary_kit.faults.scene import read_bytes

_TOLD = {"copy": 2, "forget": 1, "expect": 1, "import_records": 1}
"""Events that announce changes without a forward, each with the index of the argument with the slots."""

_EARLY = (
    "memory changed since the record of the last forward and before the check of this one; is step.before called when "
    "the forward has run, is the view of some forwards None, or is a copy of the engine's not told"
)
_LATE = "memory changed after the last forward was recorded; is step.after called before the forward has run"


class Footprints:
    """A context in which the engine's memory is compared around each forward: changes from the check to the record must
    match the view's writes, and any other change must be reported by events.

    ``strict``: written slots must change in every source, as they do in memory filled with noise.
    """

    def __init__(self, stage: Stage, strict: bool = True) -> None:
        self._stage = stage
        self._strict = strict
        self._audit: FootprintAudit | None = None
        self._problems: list[tuple[Culprit, str]] = []
        self._forwards = 0

    def __enter__(self) -> "Footprints":
        self._stage.onlooker.before, self._stage.onlooker.after = self._before, self._after
        if self._stage.onlooker.canaries:
            self._prepare()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._stage.onlooker.before = self._stage.onlooker.after = None
        if self._stage.onlooker.error is not None:
            raise self._stage.onlooker.error
        if error is None:
            self._end(_LATE)
        for canary in self._stage.onlooker.canaries:
            for name in _TOLD:
                vars(canary.slots).pop(name, None)

    def require_whole(self) -> None:
        """Raises `Nonconforming` for undescribed changes, or if no forward was audited."""
        if not self._forwards:
            raise Nonconforming("hooks", f"no forward was checked, so none could be audited{self._stage.troubles()}")
        if self._problems:
            part, _ = self._problems[0]
            outside = sum(of == "hooks" for of, _ in self._problems)
            if outside + 1 >= self._forwards > 1:
                # What changed in no forward has changed around it.
                part = "hooks"
                self._problems.sort(key=lambda problem: problem[0] != "hooks")
            shown = "; ".join(problem for _, problem in self._problems[:SHOWN])
            raise Nonconforming(part, f"{len(self._problems)} problems in {self._forwards} forwards: {shown}")

    def _prepare(self) -> None:
        regions = [region for canary in self._stage.canaries for region in canary.regions.values()]
        told = [item for canary in self._stage.canaries for item in canary.uncovered]
        pool = self._stage.session.pool_tensors
        self._audit = FootprintAudit(pool, regions, uncovered=told, strict=self._strict)
        for canary in self._stage.canaries:
            for name, place in _TOLD.items():
                setattr(canary.slots, name, self._listening(canary, name, place))
        self._audit.begin()

    def _listening(self, canary: Canary, event: str, place: int) -> Callable[..., Any]:
        tell = getattr(canary.slots, event)

        def told(region: str, *arguments: Any, **named: Any) -> Any:
            slots = arguments[place - 1] if len(arguments) >= place else named.get("slots", named.get("destination"))
            if self._audit is not None and isinstance(slots, Tensor):
                self._audit.claim_slots(region, slots)
                source = arguments[0] if arguments else named.get("source")
                if event == "copy" and isinstance(source, Tensor):
                    self._require_copied(canary, region, source, slots)
            return tell(region, *arguments, **named)

        return told

    def _require_copied(self, canary: Canary, region: str, source: Tensor, destination: Tensor) -> None:
        """When a copy is told, it was issued: the bytes are alike, but where a source is overwritten by the same
        copy."""
        state = canary.states.get(region)
        if state is None or source.shape != destination.shape:
            return
        kept = ~torch.isin(source, destination) & (source >= 0) & (source < state.region.slots)
        kept &= (destination >= 0) & (destination < state.region.slots)
        for part in state.sources:
            here = kept & part.has_bytes(source.long()) & part.has_bytes(destination.long())
            wrong = (read_bytes(part, source[here].long()) != read_bytes(part, destination[here].long())).any(1)
            if bool(wrong.any()):
                slot, to = int(source[here][wrong][0]), int(destination[here][wrong][0])
                what = (
                    f"canary.slots.copy told that slot {slot} was copied to {to}, and {part.name} has other bytes "
                    "there: tell a copy once it was issued, of the slots that it copies"
                )
                self._problems.append(("slot events", what))
                return

    def _before(self, canary: Canary, view: BatchView) -> None:
        if self._audit is None:
            self._prepare()
        else:
            self._end(_EARLY)
            self._audit.begin()
        self._forwards += 1
        if self._audit is not None:
            self._audit.claim(view)

    def _after(self, canary: Canary, view: BatchView) -> None:
        self._end()
        if self._audit is not None:
            self._audit.begin()

    def _end(self, outside: str | None = None) -> None:
        """Ends an audit. ``outside``: no forward runs; the consequence of a problem there."""
        if self._audit is None:
            return
        found = self._audit.end()
        for suspect, problem in zip(found.suspects, found.problems, strict=True):
            if outside is None or suspect == "PoolAdapter":
                self._problems.append((suspect, problem))
            else:
                self._problems.append(("hooks", f"{outside}: {problem}"))


def require_coverage(stage: Stage) -> None:
    """The regions of the stage's Canaries, and memory left out by their adapters with a reason, must be all of the
    engine's KV memory. Raises `Nonconforming`."""
    regions = [region for canary in stage.canaries for region in canary.regions.values()]
    told = [item for canary in stage.canaries for item in canary.uncovered]
    coverage = Coverage.of_engine(regions, told, stage.session.pool_tensors())
    missing = [item for item in coverage.uncovered if item not in told]
    if missing:
        names = ", ".join(f"{item.size_bytes} bytes of {item.name!r}" for item in missing)
        raise Nonconforming(
            "PoolAdapter",
            f"no region describes {names}: describe them, or say in PoolAdapter.uncovered() why they are not guarded",
        )
