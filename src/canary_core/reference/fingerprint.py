"""fingerprint: the bytes of slots. Written ones are fingerprinted and judged, recorded ones are compared."""

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
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
from canary_core.reference import plan
from canary_core.reference.check import Seen, record_fields, see
from canary_core.reference.record import won
from canary_core.reference.ring import report
from canary_core.region import KVSource
from canary_core.state import RegionState

BASELINE_SLOTS = 4096
"""Slots that `baseline` takes at a time, to bound its scratch memory."""


def slot_words(source: KVSource, slots: Tensor) -> Tensor:
    """The 32-bit words of ``slots`` (int64 ``[n]``), zero-extended: int64 ``[n, source.slot_words]``. A chunk's last
    word is padded with zero bytes."""
    storage = source.tensor.untyped_storage()
    start = source.tensor.data_ptr() - storage.data_ptr() + source.offset_bytes
    page, inside = slots // source.page_size, slots % source.page_size
    first = start + page * source.page_stride_bytes + inside * source.slot_stride_bytes
    chunk = torch.arange(source.chunks, device=slots.device) * source.chunk_stride_bytes
    first = first[:, None] + chunk  # [n, chunks]
    width = source.words_per_chunk
    if source.alignment >= 4:
        flat = torch.empty(0, dtype=torch.int32, device=slots.device).set_(storage, 0, (storage.nbytes() // 4,), (1,))
        index = (first // 4)[:, :, None] + torch.arange(width, device=slots.device)
        return flat[index].long().view(len(slots), source.slot_words) & 0xFFFFFFFF
    bytes_ = torch.empty(0, dtype=torch.uint8, device=slots.device).set_(storage, 0, (storage.nbytes(),), (1,))
    offset = torch.arange(width * 4, device=slots.device)
    there = offset < source.chunk_bytes
    byte = bytes_[first[:, :, None] + torch.where(there, offset, 0)].long() * there
    return (byte.view(len(slots), source.slot_words, 4) << torch.tensor([0, 8, 16, 24], device=slots.device)).sum(2)


def fingerprint(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """After a forward and before `record`: fingerprints the bytes of every slot that was written.

    Reports LOST_WRITE where a sure source's bytes are what they were although another token was written (or nothing
    was ever written before), NON_FINITE where a float has all its exponent bits set. Bytes unchanged by a write of the
    same token are only counted, as `UNSURE`.
    """
    writes = plan.planned_writes(state.plan, batch)
    writes = writes[won(state, writes)]
    seen = see(state, writes.slot, writes.status)
    slot, token = writes.slot, batch.token_ids[writes.token].long()
    other = (seen.step_written == 0) | (seen.token != token)
    about = {Row.POSITION: writes.position, Row.TOKEN: token, Row.WRITER: batch.writers[writes.row].long()}
    for s, source in enumerate(state.sources):
        there = _present(source, slot)
        words = slot_words(source, torch.where(there, slot, 0))
        value = _fold(state, s, words)
        old = state.fingerprints[slot, s]
        same = there & (value == old) & bool(state.descriptors[s, Descriptor.SURE])
        findings = {
            Kind.LOST_WRITE: same & other,
            Kind.NON_FINITE: there & ~(same & other) & _non_finite(state, s, words),
        }
        for kind, mask in findings.items():
            _report(state, seen, s, (kind, mask, Phase.POST_FORWARD), {**about, Row.FOUND_VALUE: value})
        state.fingerprints[slot, s] = torch.where(there, value, old)
        state.shared.counters[Counter.UNSURE] += (same & ~other).sum()
        state.shared.counters[Counter.RECORDED_BYTES] += there.sum() * source.slot_bytes


def read_check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """Before a forward and after `check`: compares the bytes of the readable slots in the next ``READ_TILES`` tiles of
    `READ_TILE` places, going round the batch. Reports BYTES."""
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


def baseline(state: RegionState) -> None:
    """At attach: fingerprints every slot as it is, so that even a slot's first write can be seen to be lost."""
    for first in range(0, state.region.slots, BASELINE_SLOTS):
        end = min(first + BASELINE_SLOTS, state.region.slots)
        slot = torch.arange(first, end, device=state.records.device)
        for s, source in enumerate(state.sources):
            there = _present(source, slot)
            value = _fold(state, s, slot_words(source, slot[there]))
            state.fingerprints[slot[there], s] = value


def _compare(state: RegionState, seen: Seen, phase: Phase, about: dict[Row, Tensor]) -> None:
    written = seen.usable & (seen.state == State.WRITTEN)
    for s, source in enumerate(state.sources):
        compared = written & _present(source, seen.slot)
        slot = torch.where(compared, seen.slot, 0)
        value = torch.zeros_like(slot)
        value[compared] = _fold(state, s, slot_words(source, slot[compared]))
        differs = compared & (value != state.fingerprints[slot, s])
        _report(state, seen, s, (Kind.BYTES, differs, phase), {Row.TOKEN: seen.token, **about, Row.FOUND_VALUE: value})
        state.shared.counters[Counter.CHECKED_BYTES] += compared.sum() * source.slot_bytes


def _report(
    state: RegionState, seen: Seen, source: int, what: tuple[Kind, Tensor, Phase], about: dict[Row, Tensor]
) -> None:
    kind, mask, phase = what
    if not bool(mask.any()):
        return
    step = state.shared.clock[Clock.NEXT]
    stored = state.fingerprints[torch.where(seen.usable, seen.slot, 0), source]
    fields = {**record_fields(seen), Row.STORED_VALUE: stored, **about}
    chosen = {word: value[mask] for word, value in fields.items()}
    where: dict[Row, Tensor | int] = {Row.REGION: state.index, Row.SOURCE: source, Row.STEP: step * 8 + phase}
    report(state.shared, kind, seen.slot[mask], {**chosen, **where})


def _present(source: KVSource, slot: Tensor) -> Tensor:
    present = source.page_size if source.present is None else source.present
    return slot % source.page_size < present


def _fold(state: RegionState, source: int, words: Tensor) -> Tensor:
    """``salt + sum(word * key)`` of each row of ``words``."""
    return state.salts[source] + (words * state.keys[: words.shape[1]]).sum(1)


def _non_finite(state: RegionState, source: int, words: Tensor) -> Tensor:
    exponent, increment, carry = (state.descriptors[source, d] for d in Descriptor if d >= Descriptor.EXPONENT)
    return (((words & exponent) + increment) & carry).any(1)
