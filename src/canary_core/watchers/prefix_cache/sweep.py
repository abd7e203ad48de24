"""`RecordSweep`: compares a prefix cache's claims about its slots with Canary's records.

The device only gathers: the slots' records, in order with the forwards on the current stream, are copied to the host
and judged there on arrival. So a sweep needs no kernel of its own and never waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from canary_core.ops.state import RegionState
from canary_core.region import RegionKind
from canary_core.runtime.host_copy import HostCopy
from canary_core.violation import Violation
from canary_core.watchers.prefix_cache.gathered import Gathered, SlotVerdict
from canary_core.watchers.prefix_cache.runs import CachedRun, Entries, FreeList
from canary_core.watchers.prefix_cache.structure import Breach, breaches, shared_slots

MOST_FINDINGS = 256
"""Most findings of one region decoded from one batch of runs; `SweepResult.found` counts all."""


class _Slots(Protocol):
    def settle(self) -> None: ...


class Guard(Protocol):
    """A `Canary`, as far as a sweep needs it."""

    @property
    def states(self) -> Mapping[str, RegionState]:
        """Canary's device memory by region."""

    @property
    def slots(self) -> _Slots:
        """`Canary.slots`: its queued events take effect before records are read."""

    @property
    def forwards(self) -> int:
        """Forwards that began."""

    def decode(self, row: Sequence[int]) -> Violation:
        """`Canary.decode`."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of one `RecordSweep.issue`: findings (the first of each region), their full number, slots compared, slots
    with an unknown record. ``shared``: (index of a run, index of another, common slot). ``numbers``: the runs' slots
    one after another, on the host."""

    findings: list[Violation]
    found: int
    slots: int
    unknown: int
    shared: list[tuple[int, int, int]]
    numbers: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Packet:
    """One `RecordSweep.issue` on its way to the host: all runs' slots, whether each is free (if known), and the tensors
    of ``regions``. ``read``: tensors the stream may still be reading, kept until the end."""

    runs: list[CachedRun]
    step: int
    has_free: bool
    regions: list[Gathered]
    copy: HostCopy
    read: tuple[object, ...]


class RecordSweep:
    """Sweeps of one `Canary`. Regions are left out where slots are not numbered as in the engine's tables: states,
    rings, and windows without a map. Tokens from ``vocabulary`` on, such as the hash of an image, are not judged."""

    def __init__(self, canary: Guard, vocabulary: int = 1 << 31) -> None:
        self._canary = canary
        self._vocabulary = vocabulary
        self._states = [
            state
            for state in canary.states.values()
            if state.region.kind not in (RegionKind.STATE, RegionKind.RING)
            and (state.region.kind is not RegionKind.WINDOW or state.region.slot_map is not None)
        ]
        self._packets: list[_Packet] = []

    def issue(self, runs: Sequence[CachedRun], free: Sequence[FreeList] = ()) -> bool:
        """Reads the records of ``runs`` on the current stream, which must be the forwards', and starts the copy to the
        host; False if there is nothing to read. Events waiting for the next forward take effect before. Tensors of the
        runs and lists must keep their values until the stream has read them."""
        whole = [run.slots for run in runs]
        before = [run.before for run in runs if run.before is not None]
        if not whole or not self._states:
            return False
        self._canary.slots.settle()
        numbers = torch.cat(whole + before).long()
        own = [item.contain(numbers) for item in free if item.region is None][:1]
        regions = [Gathered.of(state, numbers, free) for state in self._states]
        copy = HostCopy(numbers, *own, *(tensor for region in regions for tensor in region.tensors))
        self._packets.append(
            _Packet(list(runs), self._canary.forwards, bool(own), regions, copy, read=(whole, before, free))
        )
        return True

    def collect(self) -> list[SweepResult]:
        """Judges arrived batches, in order. Never waits."""
        done = []
        while self._packets and self._packets[0].copy.arrived():
            done.append(self._judge(self._packets.pop(0)))
        return done

    def drop(self) -> None:
        """Forgets batches on their way."""
        self._packets.clear()

    def _judge(self, packet: _Packet) -> SweepResult:
        entries = Entries.of(packet.runs, self._vocabulary)
        copies = iter(packet.copy.tensors)
        numbers = next(copies)[: len(entries)]
        broken: list[Breach] = []
        if packet.has_free:
            name = packet.regions[0].state.region.name
            broken.append(Breach(name, "slot_free", numbers, next(copies)[: len(entries)]))
        findings: list[Violation] = []
        verdicts = []
        for gathered in (region.on_host(copies) for region in packet.regions):
            verdict = SlotVerdict.of(gathered, entries)
            verdicts.append(verdict)
            findings += self._findings(packet, gathered, verdict, entries)
            broken += breaches(gathered, verdict, entries)
        structure = [violation for breach in broken for violation in breach.violations(entries, packet.step)]
        return SweepResult(
            findings=findings + structure[:MOST_FINDINGS],
            found=sum(len(verdict.kinds) for verdict in verdicts) + len(structure),
            slots=sum(verdict.judged for verdict in verdicts),
            unknown=sum(verdict.unknown for verdict in verdicts),
            shared=shared_slots(numbers, entries, MOST_FINDINGS),
            numbers=numbers,
        )

    def _findings(self, packet: _Packet, gathered: Gathered, verdict: SlotVerdict, entries: Entries) -> list[Violation]:
        rows = verdict.rows(gathered.state, entries, packet.step, MOST_FINDINGS)
        # Of longer lists only the first findings are decoded.
        return [
            replace(self._canary.decode(row), node=entries.node(entry))
            for row, entry in zip(rows, verdict.entries.tolist(), strict=False)
        ]
