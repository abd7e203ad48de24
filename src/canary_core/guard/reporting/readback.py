"""`ReadBack`: the host's late, non-blocking read of the counters and the violation ring."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from canary_core.ops.state import Shared
from canary_core.records import COUNTERS, GAUGES, KINDS_DRAINED, RECORDED, Counter, Row
from canary_core.runtime.host_copy import HostCopy


@dataclass(frozen=True, slots=True)
class HostRead:
    """One host read: all counters, the new violation rows in order, how many rows were dropped since the last, and the
    tallies of the first forwards, None where they were not read."""

    counters: list[int]
    rows: list[list[int]]
    dropped: int
    tallies: list[list[int]] | None


class ReadBack:
    """Copies counters to pinned host memory at the end of a step and returns them at the end of a later one; the ring
    follows only when the counters show something in it. Never waits, except in `collect_now` and `collect_beside`."""

    def __init__(self, shared: Shared, tallies: Tensor | None = None) -> None:
        self._shared = shared
        # On a CPU they are read where they are.
        self._late = shared.counters.device.type != "cpu"
        self._counters, self._ring = HostCopy(shared.counters), HostCopy(shared.ring)
        self._tallies = tallies
        self._proof = None if tallies is None else HostCopy(tallies)
        self.proving = tallies is not None
        """Whether the tallies of the first forwards (see `MemoryProof`) are read as well."""
        self._with_tallies = False
        self._in_flight = False
        self._with_ring = False
        self.seen = 0
        """Number of rows taken from the ring, or given up as dropped."""
        self._began = 0.0
        self._refused = 0

    @property
    def waiting(self) -> tuple[float | None, int]:
        """Start of the pending copy, of `time.monotonic`, None without one; and the number of requests in vain."""
        return (self._began if self._in_flight else None), self._refused

    def collect(self) -> HostRead | None:
        """Returns an earlier read, if arrived; then starts the next one on the current stream."""
        if not self._late:
            return self.collect_now()
        snapshot = None
        if self._in_flight:
            if not (self._counters.arrived() and self._ring.arrived() and self._proof_arrived()):
                self._refused += 1
                return None
            snapshot = self._open()
        self._start()
        return snapshot

    def collect_now(self) -> HostRead:
        """Everything up to now; waits for the device."""
        self._with_ring = True
        if not self._late:
            self._with_tallies = self.proving
            return self._open()
        self._start()
        self._counters.wait()
        self._ring.wait()
        if self._proof is not None:
            self._proof.wait()
        return self._open()

    def collect_beside(self, number: int) -> HostRead:
        """The first ``number`` rows since the start, as far as they are new, beside kernels that run. The kernels with
        these rows have ended; waits for two copies alone."""
        device = self._shared.counters.device
        with torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None):
            counters, ring = HostCopy(self._shared.counters), HostCopy(self._shared.ring)
            counters.wait()
            ring.wait()
            self._with_tallies, self._with_ring = False, True
            return self._read(counters.tensors[0], ring.tensors[0], number)

    def release(self) -> None:
        """No read follows: gives the ring back, and the memory on the host."""
        self._counters = self._ring = HostCopy()
        self._proof = None
        self._shared.ring.untyped_storage().resize_(0)

    def _start(self) -> None:
        self._counters.start(self._shared.counters)
        self._with_tallies = self.proving
        if self._with_tallies and self._proof is not None and self._tallies is not None:
            self._proof.start(self._tallies)
        if self._with_ring:
            self._ring.start(self._shared.ring)
        self._in_flight = True
        self._began, self._refused = time.monotonic(), 0

    def _open(self) -> HostRead:
        self._in_flight = False
        return self._read(self._counters.tensors[0], self._ring.tensors[0])

    def _read(self, host_counters: Tensor, host_ring: Tensor, number: int | None = None) -> HostRead:
        counters: list[int] = host_counters.tolist()
        counters[Counter.RECORDED_SLOTS] = sum(counters[COUNTERS + RECORDED :: GAUGES])
        tallies: list[list[int]] | None = None
        if self._with_tallies and self._proof is not None:
            tallies = self._proof.tensors[0].tolist()
        total = counters[Counter.ROWS] if number is None else number
        if total <= self.seen or not self._with_ring:
            self._with_ring = total > self.seen
            return HostRead(counters, [], 0, tallies)
        sequence = host_ring[:, Row.SEQUENCE]
        rows: list[list[int]] = sorted(host_ring[(sequence > self.seen) & (sequence <= total)].tolist())
        dropped = total - self.seen - len(rows)
        self.seen = total
        self._with_ring = False
        # In stream order after the copy, so rows that come in between find their place still taken, not overwritten.
        self._shared.counters[Counter.DRAINED].fill_(total)
        if number is None:
            kinds = self._shared.counters[KINDS_DRAINED:COUNTERS]
            kinds.copy_(host_counters[: Counter.FIRST], non_blocking=True)
        return HostRead(counters, rows, dropped, tallies)

    def _proof_arrived(self) -> bool:
        return self._proof is None or self._proof.arrived()
