"""`ReadBack`: the host's late, non-blocking read of the counters and the violation ring."""

from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.ops.state import Shared
from canary_core.records import Counter, Row


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One host read: all counters, the new violation rows in order, and how many rows were dropped since the last."""

    counters: list[int]
    rows: list[list[int]]
    dropped: int


class ReadBack:
    """Copies counters to pinned host memory at the end of a step and hands them out at the end of a later one; the
    ring follows only when the counters say that there is something in it. Never waits, except in `collect_now`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._pinned = shared.counters.device.type == "cuda"
        self._counters = self._host_like(shared.counters)
        # On the CPU the ring is read where it is: a copy of all of it at each step costs more than the check.
        self._ring = shared.ring if shared.ring.device.type == "cpu" else self._host_like(shared.ring)
        self._event = torch.cuda.Event() if self._pinned else None
        self._in_flight = False
        self._with_ring = False
        self._seen = 0

    def collect(self) -> Snapshot | None:
        """What an earlier read brought, if it has arrived; then starts the next one on the current stream."""
        if self._event is None:
            return self.collect_now()
        snapshot = None
        if self._in_flight:
            if not self._event.query():
                return None
            snapshot = self._open()
        self._start()
        return snapshot

    def collect_now(self) -> Snapshot:
        """Everything up to now; waits for the device."""
        self._with_ring = True
        self._start()
        if self._event is not None:
            self._event.synchronize()
        return self._open()

    def _start(self) -> None:
        self._counters.copy_(self._shared.counters, non_blocking=self._pinned)
        if self._with_ring and self._ring is not self._shared.ring:
            self._ring.copy_(self._shared.ring, non_blocking=self._pinned)
        if self._event is not None:
            self._event.record()
        self._in_flight = True

    def _open(self) -> Snapshot:
        self._in_flight = False
        counters: list[int] = self._counters.tolist()
        total = counters[Counter.ROWS]
        if total == self._seen or not self._with_ring:
            self._with_ring = total > self._seen
            return Snapshot(counters, [], 0)
        size = self._ring.shape[0]
        numbers = torch.arange(self._seen, min(total, self._seen + 2 * size))
        candidates = self._ring[numbers % size]
        rows: list[list[int]] = candidates[candidates[:, Row.SEQUENCE] == numbers + 1].tolist()
        dropped = total - self._seen - len(rows)
        self._seen = total
        self._with_ring = False
        # In stream order after the copy, so rows that come in between find their place still taken, not overwritten.
        self._shared.counters[Counter.DRAINED].fill_(total)
        return Snapshot(counters, rows, dropped)

    def _host_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
