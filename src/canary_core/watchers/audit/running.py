"""`RunningAudit`: audits the first forwards of a running engine, and notices when its pool moves."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.errors import CanaryError, error_text
from canary_core.events import Event
from canary_core.region import KVSource, Region, Uncovered
from canary_core.runtime.streams import capturing
from canary_core.runtime.workspace import Switch

if TYPE_CHECKING:
    from canary_core.watchers.audit.footprint import Footprint, FootprintAudit
    from canary_core.watchers.audit.memory import PoolTensors

LOOK_S = 10.0
"""Least time between two looks at where the engine's tensors are, where nothing asks for one."""


NOT_PROVEN = (
    "that the regions describe all of the engine's KV, and that views name the slots that forwards write: the engine "
    "is newer than its plugin was tested with, and is guarded without that proof, so that findings may be false and "
    "damage may be missed; install a tested release of the engine or a release of the plugin that supports this one, "
    "do what reason says, or set CANARY_UNTESTED=refuse"
)
"""Said of an engine on probation whose audit could not be made."""


class RunningAudit:
    """The audit of one Canary (``CANARY_AUDIT``): of its first ``forwards`` forwards. ``footprint``: None if the
    engine's tensors are unknown; then nothing is audited, and a moving pool is not noticed.

    Nothing raises into the engine except `judge`, in raise mode; at once, if nothing can be audited of an engine newer
    than tested.
    """

    def __init__(self, switch: Switch, footprint: "FootprintAudit | None", forwards: int) -> None:
        self._switch = switch
        self._footprint = footprint
        self._left = forwards if switch.enabled else 0
        self.due = self._left > 0
        """Whether the next forward is audited: then no work of Canary runs beside it."""
        self.open = False
        """Whether a forward is being audited."""
        self._began = 0.0
        self._told = False
        self.problems: tuple[str, ...] = ()
        """Failures, or the reason why an engine newer than tested can't be audited, until `judge` is called."""
        self._looked = 0.0
        self._arriving: dict[str, list[Tensor | None]] = {}
        self.results: list[Footprint] = []
        """Results of the audited forwards."""
        self._skipped = False
        self.seconds = 0.0
        """How long the audit took, without the forwards."""
        self.snapshot_bytes = 0
        self.snapshot_device = ""
        """Memory of the copy of the engine's KV, and its device."""
        self.moved: set[str] = set()
        """Regions of memory given up by the engine."""
        self.forget: Callable[[str, None], None] | None = None
        """Called with the name of a moved region."""
        if self._left and footprint is None:
            self._skip("nobody says which tensors hold the engine's KV; implement PoolAdapter.pool_tensors()")
            self.judge()

    @property
    def counts(self) -> dict[str, int]:
        """For `Canary.stats`; empty where nothing was audited."""
        if not self.results:
            return {}
        unclaimed = sum(r.unclaimed_bytes for r in self.results)
        return {"audited_forwards": len(self.results), "audit_unclaimed_bytes": unclaimed}

    @property
    def left(self) -> int:
        """Forwards left to audit."""
        return self._left

    def start(
        self, pool_tensors: "PoolTensors", regions: Sequence[Region], uncovered: Sequence[Uncovered], forwards: int
    ) -> None:
        """Audits the next ``forwards`` forwards, of an engine whose tensors did not exist, or were unknown, when Canary
        attached; see `FootprintAudit`. `let_go` ends the audit."""
        if not self._switch.enabled:
            return
        self._left, self.due = forwards, forwards > 0
        with self._ours():
            from canary_core.watchers.audit.footprint import FootprintAudit

            self._footprint = FootprintAudit(pool_tensors, regions, uncovered=uncovered)

    def begin(self, view: BatchView | None) -> None:
        """Right before the forward of ``view``. Never in a graph: then the audit ends, with a word why."""
        if not self._left or self._footprint is None:
            return
        if capturing(self._footprint.device):
            self._skip("a CUDA graph is captured that holds Canary's own work; let the audit run without graphs")
            return
        with self._ours():
            self.look()
            began = time.perf_counter()
            for region, arriving in self._arriving.items():
                for slots in arriving:
                    self._footprint.claim_slots(region, slots)
            self._footprint.begin()
            self._footprint.claim(view)
            self.open = True
            self._began = time.perf_counter()
            self.seconds += self._began - began

    def end(self) -> None:
        """Right after the forward, once the host has reported all events: compares."""
        if not self.open or self._footprint is None:
            return
        self.open = False
        with self._ours():
            began = time.perf_counter()
            result = self._footprint.end()
            self.seconds += time.perf_counter() - began
            snapshot = self._footprint.snapshot
            if snapshot is not None:
                self.snapshot_bytes, self.snapshot_device = snapshot.size_bytes, str(snapshot.device)
            self.results.append(result)
            self._left -= 1
            self.due = self._left > 0
            if result.problems:
                self._fail(result)
            elif not self._left:
                self.tell()

    def abandon(self) -> None:
        """The forward has failed."""
        if self.open and self._footprint is not None:
            self.open = False
            self._footprint.abandon()

    def claim(self, region: str, slots: Tensor | None, *, arriving: bool | None = None) -> None:
        """Claims slots as changed by something else than a forward. ``arriving``: True, from now on and until the
        arrival is reported with False; None: now."""
        if not self._left or self._footprint is None or capturing(self._footprint.device):
            return
        with self._ours():
            # Whoever tells an event may go on to use the tensor for something else.
            kept = None if slots is None else slots.detach().clone()
            self._footprint.claim_slots(region, kept)
            if arriving:
                self._arriving.setdefault(region, []).append(kept)
            elif arriving is False and region in self._arriving:
                self._arriving[region] = _without(self._arriving[region], kept)

    def claim_writes(self, view: BatchView) -> None:
        """Claims the slots that another forward, of ``view``, writes within the next one."""
        if not self.due or self._footprint is None or capturing(self._footprint.device):
            return
        with self._ours():
            self._footprint.claim_writes(view)

    @property
    def follows_sources(self) -> bool:
        """Whether the audit needs the place of a region's sources, and `rebind` does anything."""
        return self._footprint is not None

    def rebind(self, region: str, sources: Sequence[KVSource]) -> None:
        """The adapter says where the bytes of ``region`` are now."""
        if self._footprint is not None:
            self._footprint.rebind(region, sources)
            self.moved.discard(region)

    def look(self, now_and_then: bool = False) -> None:
        """Whether the regions still describe memory of the engine's. ``now_and_then``: at most once in `LOOK_S`."""
        now = time.monotonic()
        if self._footprint is None or (now_and_then and now - self._looked < LOOK_S):
            return
        self._looked = now
        moved: Mapping[str, list[str]] = {}
        with self._ours():
            moved = self._footprint.moved()
        for region, sources in moved.items():
            if region not in self.moved:
                self.moved.add(region)
                self._tell_moved(region, sources)

    def let_go(self) -> None:
        """Stops watching the engine's tensors, unless forwards are left to audit: for a cache made anew by each
        forward."""
        if not self._left:
            self._footprint = None

    def tell(self) -> None:
        """Reports the result of the audit, once, if all forwards so far passed."""
        if self._told or not self.results:
            return
        self._told = True
        fields = self._totals()
        self._switch.tell(Event("audit", fields=fields))
        self._stop()

    def judge(self) -> None:
        """Between forwards, once: acts on a failed audit, or on a missing one that was due for an engine newer than
        tested. Raises `AttachError` in raise mode; in log mode a failure switches Canary off if the engine is newer
        than its plugin was tested with."""
        problems, self.problems = self.problems, ()
        if self._skipped:
            self._switch.audit_skipped(problems)
        else:
            self._switch.audit_failed(problems)

    def _fail(self, result: "Footprint") -> None:
        fields = {"problems": list(result.problems), **self._totals(), "unchanged": result.unchanged}
        self._told = True
        self.problems = tuple(f"forward {len(self.results)}: {problem}" for problem in result.problems)
        self._switch.tell(Event("audit_failed", "error", fields))
        self._stop()

    def _totals(self) -> dict[str, object]:
        """Of all audited forwards."""
        sums = ("compared_bytes", "changed_bytes", "claimed_bytes", "unclaimed_bytes")
        return {
            "forwards": len(self.results),
            **{name: sum(getattr(r, name) for r in self.results) for name in sums},
            "written_slots": sum(sum(r.written_slots.values()) for r in self.results),
            "snapshot_bytes": self.snapshot_bytes,
            "snapshot_device": self.snapshot_device,
            "seconds": round(self.seconds, 3),
        }

    def _tell_moved(self, region: str, sources: list[str]) -> None:
        reason = (
            f"region {region!r} describes memory that is none of the engine's ({len(sources)} of its sources): the "
            "engine has put its KV elsewhere, and the adapter still describes the old tensors; tell where the bytes "
            "are now (slots.rebind), or attach anew. Nothing is found there any more"
        )
        fields: dict[str, object] = {"region": region, "sources": sources, "reason": reason}
        self._switch.tell(Event("pool_moved", "error", fields))
        if self.forget is not None:
            self.forget(region, None)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """An exception within ends the audit, and is the reason."""
        try:
            yield
        except Exception as error:
            self._skip(str(error) if isinstance(error, CanaryError) else error_text(error))

    def _skip(self, reason: str) -> None:
        if self._left:
            fields: dict[str, object] = {"reason": reason, "forwards": len(self.results)}
            if self._switch.on_probation and not any(result.changed_bytes for result in self.results):
                self._skipped, self.problems = True, (reason,)
                fields["not_proven"] = NOT_PROVEN
            self._switch.tell(Event("audit_skipped", "error" if self._skipped else "warning", fields))
        self.abandon()
        self._stop()

    def _stop(self) -> None:
        """No more forwards; gives the copy's memory back."""
        self._left, self.due = 0, False
        self._arriving = {}
        if self._footprint is not None:
            self._footprint.release()


def _without(arriving: list[Tensor | None], arrived: Tensor | None) -> list[Tensor | None]:
    if arrived is None:
        return []
    left = [slots if slots is None else slots[~_among(slots, arrived)] for slots in arriving]
    return [slots for slots in left if slots is None or len(slots)]


def _among(slots: Tensor, others: Tensor) -> Tensor:
    return torch.isin(slots, others.to(slots.device))
