"""`RecordSweep`: compares what a prefix cache says that its slots hold with what Canary remembers of them.

The device only gathers: the records of the slots, in order with the forwards on the stream that it is called on, are
copied to the host, and judged there once they have arrived. So a sweep needs no kernel of its own and never waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from canary_core.ops import hashing
from canary_core.ops.state import RegionState
from canary_core.records import (
    FREED_BY,
    POSITION,
    PREFIX_HASH,
    ROW_WORDS,
    STATES,
    STEP_FREED,
    STEP_WRITTEN,
    TOKEN,
    WRITER,
    Kind,
    Phase,
    Row,
    State,
)
from canary_core.region import RegionKind
from canary_core.violation import Violation

if TYPE_CHECKING:
    from canary_core.canary import Canary

UNKNOWN = -1
"""A token that the cache doesn't tell."""

MOST_FINDINGS = 256
"""Findings of one region that are decoded from one batch of runs; `Judged.found` counts all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedRun:
    """Consecutive tokens of one node of a prefix cache.

    node: the engine's number of it, None if it has none. first: position of the first token. slots: integer ``[n]`` on
    the pool's device, the numbers that the engine's tables use. before: ``[1]``, the slot of the token before, None if
    there is none or it is nowhere on the device. tokens: int64 ``[n]`` on the host, `UNKNOWN` where the cache doesn't
    say, None for none. absent: regions in which the run must have no slots (a window that has passed).
    """

    node: int | None
    first: int
    slots: Tensor
    before: Tensor | None = None
    tokens: Tensor | None = None
    absent: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class FreeList:
    """Pages of ``page_size`` slots that an allocator has free, as it has them when the runs are read: slots of
    ``region``, or where that is None the numbers of `CachedRun.slots`. ``slots``: how many there are in all."""

    region: str | None
    pages: tuple[Tensor, ...]
    page_size: int
    slots: int

    def contain(self, slot: Tensor) -> Tensor:
        """Which of ``slot`` are free, bool; numbers that are no slots are not."""
        count = -(-self.slots // self.page_size)
        free = torch.zeros(count, dtype=torch.bool, device=slot.device)
        for pages in self.pages:
            # Not an assignment, for which the number would be copied from the host.
            free.index_fill_(0, pages.long().clamp(0, count - 1), True)
        inside = (slot >= 0) & (slot < self.slots)
        return inside & free[torch.where(inside, slot, 0) // self.page_size]


@dataclass(frozen=True, slots=True)
class Judged:
    """What one `RecordSweep.issue` came to: findings (the first of each region), how many there are in all, slots
    compared, slots whose record says nothing. ``shared``: (index of a run, index of another, a slot that both name).
    ``numbers``: the runs' slots one after another, on the host."""

    findings: list[Violation]
    found: int
    slots: int
    unknown: int
    shared: list[tuple[int, int, int]]
    numbers: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Gathered:
    """What the device knew of one region at that moment: each number's slot, its record, and whether it is free."""

    state: RegionState
    slot: Tensor
    records: Tensor
    free: Tensor | None

    @property
    def held(self) -> Tensor:
        """Numbers that have a slot in the region, bool."""
        region = self.state.region
        null = -1 if region.null_slot is None else region.null_slot
        return (self.slot >= 0) & (self.slot < region.slots) & (self.slot != null)


@dataclass(frozen=True, slots=True, eq=False)
class _Packet:
    """One `RecordSweep.issue` on its way. ``read``: what the stream may still be reading, kept until it has."""

    runs: list[CachedRun]
    step: int
    numbers: Tensor
    free: Tensor | None
    regions: list[_Gathered]
    read: tuple[object, ...]
    ready: torch.cuda.Event | None


class RecordSweep:
    """Sweeps of one `Canary`. Regions whose slots are not those of the engine's tables are left out: states, rings, and
    windows without a map. Tokens of ``vocabulary`` and above, such as the hash of an image, are not judged."""

    def __init__(self, canary: "Canary", vocabulary: int = 1 << 31) -> None:
        self._canary = canary
        self._vocabulary = vocabulary
        self._states = [
            state
            for state in canary.states.values()
            if state.region.kind not in (RegionKind.STATE, RegionKind.RING)
            and (state.region.kind is not RegionKind.WINDOW or state.region.slot_map is not None)
        ]
        self._packets: list[_Packet] = []

    @property
    def in_flight(self) -> bool:
        """Whether there is something to `collect`."""
        return bool(self._packets)

    def issue(self, runs: Sequence[CachedRun], free: Sequence[FreeList] = ()) -> bool:
        """Reads the records of ``runs`` on the current stream, which must be the forwards', and starts to copy them to
        the host; False where there is nothing to read. Events that wait for the next forward take effect before.
        Tensors of the runs and lists must keep their values until this stream has read them."""
        whole = [run.slots for run in runs]
        before = [run.before for run in runs if run.before is not None]
        if not whole or not self._states:
            return False
        self._canary.slots.settle()
        numbers = torch.cat(whole + before).long()
        own = next((item.contain(numbers) for item in free if item.region is None), None)
        regions = []
        for state in self._states:
            slot = _region_slots(state, numbers)
            records = state.records[slot.clamp(0, state.region.slots - 1)]
            listed = next((item.contain(slot) for item in free if item.region == state.region.name), None)
            regions.append(
                _Gathered(state, _to_host(slot), _to_host(records), None if listed is None else _to_host(listed))
            )
        packet = _Packet(
            runs=list(runs),
            step=self._canary.forwards,
            numbers=_to_host(numbers),
            free=None if own is None else _to_host(own),
            regions=regions,
            read=(whole, before, free),
            ready=torch.cuda.Event() if numbers.is_cuda else None,
        )
        if packet.ready is not None:
            packet.ready.record()
        self._packets.append(packet)
        return True

    def collect(self) -> list[Judged]:
        """Judges what has arrived, in order. Never waits."""
        done = []
        while self._packets and (self._packets[0].ready is None or self._packets[0].ready.query()):
            done.append(self._judge(self._packets.pop(0)))
        return done

    def drop(self) -> None:
        """Forgets what is in flight."""
        self._packets.clear()

    def _judge(self, packet: _Packet) -> Judged:
        places = _Places.of(packet.runs, self._vocabulary)
        findings: list[Violation] = []
        found = slots = unknown = 0
        for gathered in packet.regions:
            verdict = _Verdict.of(gathered, places)
            slots += verdict.judged
            unknown += verdict.unknown
            found += len(verdict.kinds)
            findings += [
                self._finding(packet, gathered, places, verdict, i)
                for i in range(min(len(verdict.kinds), MOST_FINDINGS))
            ]
        structure = self._structure(packet, places)
        return Judged(
            findings=findings + structure[:MOST_FINDINGS],
            found=found + len(structure),
            slots=slots,
            unknown=unknown,
            shared=_shared(packet, places),
            numbers=packet.numbers[: len(places.run)],
        )

    def _finding(
        self, packet: _Packet, gathered: _Gathered, places: "_Places", verdict: "_Verdict", index: int
    ) -> Violation:
        entry, kind = int(verdict.entries[index]), Kind(int(verdict.kinds[index]))
        group = gathered.state.region.tokens_per_slot
        record = gathered.records[entry]
        usable = kind not in (Kind.SLOT_RANGE, Kind.NULL_SLOT)
        row = [-1] * ROW_WORDS
        row[Row.KIND] = kind
        row[Row.REGION] = gathered.state.index
        row[Row.SLOT] = int(gathered.slot[entry])
        row[Row.POSITION] = int(places.position[entry]) // group
        row[Row.TOKEN] = int(places.token[entry])
        row[Row.STEP] = packet.step * 8 + Phase.SWEEP
        if usable:
            row[Row.STORED_TOKEN] = int(record[TOKEN])
            row[Row.STORED_POSITION] = int(record[POSITION])
            row[Row.STORED_VALUE] = int(_hash(record[None])[0])
            row[Row.STORED_WRITER] = int(record[WRITER])
            row[Row.STEP_WRITTEN] = int(record[STEP_WRITTEN])
            row[Row.FREED] = int(record[FREED_BY]) << 32 | int(record[STEP_FREED])
        if kind is Kind.PREFIX:
            row[Row.FOUND_VALUE] = int(verdict.should_be[index])
        return replace(self._canary.decode(row), node=packet.runs[int(places.run[entry])].node)

    def _structure(self, packet: _Packet, places: "_Places") -> list[Violation]:
        """Slots that are cached and free, and slots of windows that have passed."""
        found = []
        count = len(places.run)
        if packet.free is not None:
            region = packet.regions[0].state.region.name
            found += _broken(packet, places, (region, "slot_free"), packet.numbers, packet.free[:count])
        for gathered in packet.regions:
            region, slot = gathered.state.region.name, gathered.slot
            if gathered.state.region.slot_map is None:
                continue
            absent, held = places.absent(region), gathered.held[:count]
            found += _broken(packet, places, (region, "window_slot"), slot, absent & held)
            if gathered.free is not None:
                found += _broken(packet, places, (region, "slot_free"), slot, gathered.free[:count] & held & ~absent)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """One entry for each token of the runs, int64 ``[n]``: its run, position, token, index within the run; ``before``:
    the entry of the run's token before its first one, -1 where there is none."""

    runs: list[CachedRun]
    run: Tensor
    position: Tensor
    token: Tensor
    inside: Tensor
    before: Tensor

    @classmethod
    def of(cls, runs: list[CachedRun], vocabulary: int) -> "_Places":
        lengths = torch.tensor([len(run) for run in runs])
        count = int(lengths.sum())
        run = torch.repeat_interleave(torch.arange(len(runs)), lengths)
        inside = torch.arange(count) - (lengths.cumsum(0) - lengths)[run]
        first = torch.tensor([item.first for item in runs])
        has = torch.tensor([item.before is not None for item in runs])
        before = torch.where(has, count + has.long().cumsum(0) - 1, -1)
        tokens = [
            torch.full((len(item),), UNKNOWN, dtype=torch.int64) if item.tokens is None else item.tokens
            for item in runs
        ]
        token = torch.cat(tokens)
        token = torch.where((token < 0) | (token >= vocabulary), UNKNOWN, token)
        return cls(runs, run, first[run] + inside, token, inside, before[run])

    def absent(self, region: str) -> Tensor:
        """Entries of runs that have no slots in ``region``, bool."""
        return torch.tensor([region in run.absent for run in self.runs])[self.run]


@dataclass(frozen=True, slots=True, eq=False)
class _Verdict:
    """Bad entries of one region with their kinds and, for `Kind.PREFIX`, the hash that should be there; how many were
    judged, and how many have a record that says nothing."""

    entries: Tensor
    kinds: Tensor
    should_be: Tensor
    judged: int
    unknown: int

    @classmethod
    def of(cls, gathered: _Gathered, places: _Places) -> "_Verdict":
        """At most one finding an entry, in the order of the check before a forward; see `reference.check`."""
        region = gathered.state.region
        group = region.tokens_per_slot
        count = len(places.run)
        chosen = ~places.absent(region.name)
        if group > 1:
            chosen &= (places.position + 1) % group == 0
        slot, records = gathered.slot[:count], gathered.records
        position = places.position // group
        word, hash = records[:, POSITION].long(), _hash(records)
        state = word & (STATES - 1)
        freed = (state & State.FREED) != 0
        token = records[:count, TOKEN].long()
        own = (places.token == UNKNOWN) | (places.token == token)
        placed = word[:count] == position * STATES + State.WRITTEN
        # The entry that holds the token, or the group of tokens, before: of this run, or the slot before it.
        entry = torch.arange(count)
        prior = torch.where(places.inside >= group, entry - group, -1)
        prior = torch.where(places.inside == group - 1, places.before, prior)
        at = prior.clamp(min=0)
        prior_usable = (gathered.slot[at] >= 0) & (gathered.slot[at] < region.slots)
        linked = (prior >= 0) & prior_usable & (word[at] == (position - 1) * STATES + State.WRITTEN)
        linked &= (hash[at] != 0) & (hash[:count] != 0) & (position > 0)
        should_be = hash[at] + hashing.mix(token, position)

        null = slot < 0
        if region.null_slot is not None:
            null |= slot == region.null_slot
        wild = slot >= region.slots
        usable = ~null & ~wild
        written = state[:count] == State.WRITTEN
        empty = (state[:count] == State.UNWRITTEN) | (state[:count] == State.ALLOCATED)
        kind = torch.full((count,), -1)
        kind[placed & own & linked & (hash[:count] != should_be)] = Kind.PREFIX
        kind[placed & ~own] = Kind.TOKEN
        kind[written & ~placed] = Kind.POSITION
        kind[freed[:count]] = Kind.FREED
        kind[~freed[:count] & empty] = Kind.UNWRITTEN
        kind[null] = Kind.NULL_SLOT
        kind[wild] = Kind.SLOT_RANGE
        bad = (chosen & (kind >= 0)).nonzero()[:, 0]
        unknown = int((chosen & usable & (state[:count] == State.UNKNOWN)).sum())
        return cls(bad, kind[bad], should_be[bad], int(chosen.sum()), unknown)


def _region_slots(state: RegionState, numbers: Tensor) -> Tensor:
    """The region's slots of the engine's numbers; ``region.slots`` for numbers beyond its map."""
    region = state.region
    slot = numbers
    if region.tokens_per_slot > 1:
        slot = torch.where(slot >= 0, slot // region.tokens_per_slot, slot)
    if region.slot_map is not None:
        mapped = region.slot_map[slot.clamp(0, region.slot_map.shape[0] - 1)].long()
        slot = torch.where(slot < 0, slot, torch.where(slot < region.slot_map.shape[0], mapped, region.slots))
    return slot


def _hash(records: Tensor) -> Tensor:
    return records[:, PREFIX_HASH : PREFIX_HASH + 2].contiguous().view(torch.int64)[:, 0]


def _broken(packet: _Packet, places: _Places, where: tuple[str, str], slots: Tensor, mask: Tensor) -> list[Violation]:
    """A finding for each entry of ``mask``; ``where``: region and rule."""
    region, rule = where
    found = []
    for entry in mask.nonzero()[:, 0].tolist():
        slot, position = int(slots[entry]), int(places.position[entry])
        detail = f"slot {slot}, which holds its position {position}, is in the allocator's free list as well"
        if rule == "window_slot":
            detail = f"its window has passed, but position {position} still has slot {slot} there"
        found.append(
            Violation(
                kind=Kind.CACHE_STRUCTURE,
                region=region,
                phase=Phase.SWEEP,
                step=packet.step,
                slot=slot,
                position=position,
                node=packet.runs[int(places.run[entry])].node,
                rule=rule,
                detail=detail,
            )
        )
    return found


def _shared(packet: _Packet, places: _Places) -> list[tuple[int, int, int]]:
    """Pairs of different runs that name the same slot."""
    slot, order = packet.numbers[: len(places.run)].sort(stable=True)
    run = places.run[order]
    twice = ((slot[1:] == slot[:-1]) & (run[1:] != run[:-1])).nonzero()[:, 0]
    return [(int(run[i]), int(run[i + 1]), int(slot[i])) for i in twice[:MOST_FINDINGS].tolist()]


def _to_host(tensor: Tensor) -> Tensor:
    """On its way to the host: complete once an event recorded afterwards is."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
