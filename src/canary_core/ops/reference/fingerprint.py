"""fingerprint: the bytes of slots. Written ones are fingerprinted and judged, recorded ones are compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.mapping import Seen, see
from canary_core.ops.reference import plan
from canary_core.ops.reference.record import won
from canary_core.ops.reference.ring import report
from canary_core.ops.sources import SourceTable
from canary_core.ops.state import RegionState
from canary_core.records import (
    READ_TILE,
    Clock,
    Counter,
    Cursor,
    Descriptor,
    Kind,
    Phase,
    Row,
    State,
    Status,
)
from canary_core.region import KVSource

MOST_WORDS = 1 << 22
"""How many words are read at a time, which bounds scratch memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Sources that lie in one storage and differ only in where they begin: one call fingerprints all of them.

    like: one of them. columns, starts: int64 ``[g]``, their indices among the region's sources and their first bytes in
    the storage.
    """

    like: KVSource
    columns: Tensor
    starts: Tensor

    def words(self, slots: Tensor) -> Tensor:
        """The 32-bit words of ``slots`` (int64 ``[n]``), zero-extended: int64 ``[g, n, slot_words]``. A chunk's last
        word is padded with zero bytes."""
        source, device = self.like, slots.device
        storage = source.tensor.untyped_storage()
        inside = slots % source.page_size * source.slot_stride_bytes
        first = slots // source.page_size * source.page_stride_bytes + inside
        chunk = torch.arange(source.chunks, device=device) * source.chunk_stride_bytes
        first = self.starts[:, None, None] + first[:, None] + chunk  # [g, n, chunks]
        width, shape = source.words_per_chunk, (len(self.starts), len(slots), source.slot_words)
        if source.alignment >= 4:
            flat = torch.empty(0, dtype=torch.int32, device=device).set_(storage, 0, (storage.nbytes() // 4,), (1,))
            index = (first // 4)[..., None] + torch.arange(width, device=device)
            return flat[index].long().view(shape) & 0xFFFFFFFF
        bytes_ = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
        offset = torch.arange(width * 4, device=device)
        there = offset < source.chunk_bytes
        byte = bytes_[first[..., None] + torch.where(there, offset, 0)].long() * there
        return (byte.view(*shape, 4) << torch.tensor([0, 8, 16, 24], device=device)).sum(3)

    def fold(self, state: RegionState, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Fingerprint of each slot in each source, ``salt + sum(word * key)``, int64 ``[g, n]``; and whether one of its
        floats has all its exponent bits set, bool ``[g, n]``."""
        salts = state.sources.salts[self.columns][:, None]
        descriptors = state.sources.descriptors[self.columns][:, None, None]
        exponent, increment, carry = (descriptors[..., d] for d in Descriptor if d >= Descriptor.EXPONENT)
        keys = state.sources.keys[: self.like.slot_words]
        values, odd = [], []
        for piece in slots.split(max(MOST_WORDS // (len(self.starts) * self.like.slot_words), 1)):
            words = self.words(piece)
            values.append(salts + (words * keys).sum(2))
            odd.append((((words & exponent) + increment) & carry).any(2))
        return torch.cat(values, 1), torch.cat(odd, 1)


def stacks(state: RegionState) -> tuple[Stack, ...]:
    """The region's sources by what they have in common; worked out anew when the region was bound to other tensors."""
    known = _stacks.get(state.sources)
    if known is not None and known[0] is state.sources.bound:
        return known[1]
    alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for column, s in enumerate(state.sources):
        storage = s.tensor.untyped_storage()
        geometry = (
            s.page_size,
            s.page_stride_bytes,
            s.slot_stride_bytes,
            s.chunks,
            s.chunk_stride_bytes,
            s.chunk_bytes,
        )
        key = (storage.data_ptr(), *geometry, s.present_slots, s.alignment >= 4)
        alike.setdefault(key, []).append((column, s.address - storage.data_ptr()))
    device = state.records.device
    found = tuple(
        Stack(
            state.sources[members[0][0]],
            torch.tensor([column for column, _ in members], device=device),
            torch.tensor([start for _, start in members], device=device),
        )
        for members in alike.values()
    )
    _stacks[state.sources] = (state.sources.bound, found)
    return found


_stacks: WeakKeyDictionary[SourceTable, tuple[tuple[KVSource, ...], tuple[Stack, ...]]] = WeakKeyDictionary()
"""What `stacks` gave, and for which sources."""


def fingerprint(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """After a forward and before `record`: fingerprints the bytes of every slot that was written.

    Reports LOST_WRITE where a sure source's bytes are what they were although another token was written (or nothing
    was ever written before), NON_FINITE where a float has all its exponent bits set. Bytes unchanged by a write of the
    same token are only counted, as `UNSURE`. No new fingerprint equals one that is not known.
    """
    writes = plan.planned_writes(state.scratch.plan, batch)
    writes = writes[won(state, writes)]
    seen = see(state, writes.slot, writes.status)
    slot, token = writes.slot, batch.token_ids[writes.token].long()
    other = (seen.step_written == 0) | (seen.token != token)
    about = {
        Row.POSITION: writes.position,
        Row.TOKEN: token,
        Row.WRITER: batch.writers[writes.row].long(),
        Row.STEP: state.shared.clock[Clock.NEXT] * 8 + Phase.POST_FORWARD,
    }
    sure = state.sources.descriptors[:, Descriptor.SURE] != 0
    for stack in stacks(state):
        there = stack.like.has_bytes(slot)
        value, odd = stack.fold(state, torch.where(there, slot, 0))
        old = state.fingerprints[slot[:, None], stack.columns].T
        same = there & (value == old) & sure[stack.columns, None]
        lost = same & other
        findings = {Kind.LOST_WRITE: lost, Kind.NON_FINITE: there & ~lost & odd}
        _report(state, seen, stack, findings, {**about, Row.FOUND_VALUE: value})
        state.fingerprints[slot[:, None], stack.columns] = torch.where(there, value, old).T
        state.shared.counters[Counter.UNSURE] += (same & ~other).sum()
        state.shared.counters[Counter.RECORDED_BYTES] += there.sum() * len(stack.columns) * stack.like.slot_bytes


def read_check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """Before a forward and after `check`: compares the bytes of the readable slots in the next ``READ_TILES`` tiles of
    `READ_TILE` places, going round the batch. Reports BYTES. A slot whose bytes equal their fingerprint counts as
    compared, whatever its record says: only where they differ does a kernel look whether the slot was written."""
    rows = plan.rows(state.region, batch, table)
    places = plan.expand(rows.read_first, rows.prefix)
    count = rows.prefix - rows.read_first
    tiles = (count + READ_TILE - 1) // READ_TILE
    total = tiles.sum()
    tile = (tiles.cumsum(0) - tiles)[places.row] + (places.position - rows.read_first[places.row]) // READ_TILE
    # `check` has already moved the cursor past this forward's stretch.
    budget = torch.minimum(state.cursors[Cursor.READ_TILES], total)
    first = state.cursors[Cursor.READ] - budget
    chosen = (tile - first) % total.clamp(min=1) < budget
    places = plan.Places(places.row[chosen], places.position[chosen])
    seen = see(state, *plan.lookup(state.region, table, places))
    about = {Row.POSITION: places.position, Row.WRITER: batch.writers[places.row].long()}
    _compare(state, seen, Phase.PRE_FORWARD, about)


def scrub(state: RegionState) -> None:
    """After `record`: compares the bytes of the next ``SCRUB_SLOTS`` slots in physical order. Reports BYTES."""
    count = min(int(state.cursors[Cursor.SCRUB_SLOTS]), state.region.slots)
    slot = (state.cursors[Cursor.SCRUB] + torch.arange(count, device=state.records.device)) % state.region.slots
    nobody = torch.full_like(slot, -1)
    seen = see(state, slot, torch.full_like(slot, Status.OK))
    _compare(state, seen, Phase.SCRUB, {Row.POSITION: nobody, Row.WRITER: nobody})
    state.shared.counters[Counter.SCRUBBED_SLOTS] += count
    state.cursors[Cursor.SCRUB_NEXT] = (state.cursors[Cursor.SCRUB] + count) % state.region.slots


def verify(state: RegionState, slots: Tensor) -> None:
    """Between forwards: compares the bytes of ``slots`` (integer ``[n]``). Reports BYTES. Numbers that are no slots are
    left out."""
    slot = slots.long()
    outside = (slot < 0) | (slot >= state.region.slots)
    nobody = torch.full_like(slot, -1)
    seen = see(state, slot, torch.where(outside, int(Status.RANGE), int(Status.OK)))
    _compare(state, seen, Phase.EVENT, {Row.POSITION: nobody, Row.WRITER: nobody})


def baseline(state: RegionState) -> None:
    """At attach: fingerprints every slot as it is, so that even a slot's first write can be seen to be lost."""
    every = torch.arange(state.region.slots, device=state.records.device)
    for stack in stacks(state):
        slot = every[stack.like.has_bytes(every)]
        value, _ = stack.fold(state, slot)
        state.fingerprints[slot[:, None], stack.columns] = value.T


def _compare(state: RegionState, seen: Seen, phase: Phase, about: dict[Row, Tensor]) -> None:
    """Where a fingerprint is 0, which says that it is not known, nothing is compared."""
    written = seen.usable & (seen.state == State.WRITTEN)
    # Nearly all slots that a batch reads were written, so a kernel looks at the record only where bytes differ.
    asked = seen.usable if phase is Phase.PRE_FORWARD else written
    for stack in stacks(state):
        compared = asked & stack.like.has_bytes(seen.slot)
        slot = seen.slot[compared]
        value, _ = stack.fold(state, slot)
        stored = state.fingerprints[slot[:, None], stack.columns].T
        alike = (value == stored) & (stored != 0)
        differs = (value != stored) & (stored != 0) & written[compared]
        state.shared.counters[Counter.CHECKED_BYTES] += (alike | differs).sum() * stack.like.slot_bytes
        if bool(differs.any()):
            # Back to the shape of what was seen, for the report.
            mask = torch.zeros(len(stack.columns), len(compared), dtype=torch.bool, device=slot.device)
            found = torch.zeros_like(mask, dtype=torch.int64)
            mask[:, compared], found[:, compared] = differs, value
            step = state.shared.clock[Clock.NEXT] * 8 + phase
            fields = {Row.TOKEN: seen.token, **about, Row.FOUND_VALUE: found, Row.STEP: step}
            _report(state, seen, stack, {Kind.BYTES: mask}, fields)


def _report(
    state: RegionState, seen: Seen, stack: Stack, findings: Mapping[Kind, Tensor], about: Mapping[Row, Tensor]
) -> None:
    """One finding for each place and source of a mask of ``findings``, bool ``[g, n]``. Fields of ``about`` are one
    number for all, or ``[n]``, or ``[g, n]`` where the sources differ in them."""
    for kind, masks in findings.items():
        if not bool(masks.any()):
            continue
        for i, source in enumerate(stack.columns.tolist()):
            mask = masks[i]
            stored = state.fingerprints[torch.where(seen.usable, seen.slot, 0), source]
            own = {word: value[i] if value.dim() == 2 else value for word, value in about.items()}
            fields: dict[Row, Tensor] = {**seen.fields(), Row.STORED_VALUE: stored, **own}
            chosen = {word: value[mask] if value.dim() else value for word, value in fields.items()}
            report(state.shared, kind, seen.slot[mask], {**chosen, Row.REGION: state.index, Row.SOURCE: source})
