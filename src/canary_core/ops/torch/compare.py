"""read_check, scrub, verify: the bytes of slots, against the recorded fingerprints."""

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.mapping import Seen, see
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.ops.torch.stack import report_bytes, stacks
from canary_core.records import (
    COUNTERS,
    GAUGES,
    POSITION,
    PROBE,
    READ_TILE,
    SCRUB_GAUGES,
    SCRUB_WORDS,
    STATES,
    Clock,
    Counter,
    Cursor,
    Kind,
    Phase,
    Row,
    ScrubWord,
    State,
    Status,
)


def read_check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """Before a forward and after `check`: compares the bytes of the readable slots in the next ``READ_TILES`` tiles of
    `READ_TILE` places, going round the batch. Reports BYTES. A slot whose bytes equal their fingerprint counts as
    compared, whatever its record says: only after a difference does a kernel ask whether the slot was written."""
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


def scrub(state: RegionState, probed: bool = False) -> None:
    """After `record`: compares the bytes of the listed slots (see `ScrubWord.LIST`), and lists slots for the next
    scrub. Reports BYTES. As in `read_check`, the record is asked only where bytes differ. ``probed``: the list's first
    slot also reports PROBE, see `Cursor.PROBE`."""
    device = state.records.device
    place = state.cursors[Cursor.SCRUB :][:SCRUB_WORDS].tolist()
    half, count = place[ScrubWord.LIST] >> 32, place[ScrubWord.LIST] & 0xFFFFFFFF
    slot = state.listed[half, :count].long()
    nobody = torch.full_like(slot, -1)
    seen = see(state, slot, torch.full_like(slot, Status.OK))
    probe = int(state.cursors[Cursor.PROBE]) - 1 if probed else -1
    _compare(state, seen, Phase.SCRUB, {Row.POSITION: nobody, Row.WRITER: nobody}, probe)

    following = _list_next(state, place)
    passed = following[ScrubWord.RUNNING] - place[ScrubWord.RUNNING]
    state.shared.counters[Counter.SCRUBBED_SLOTS] += passed
    gauges = state.shared.counters[COUNTERS + state.index * GAUGES :][:SCRUB_GAUGES]
    gauges.copy_(torch.tensor(following[ScrubWord.RUNNING :][:SCRUB_GAUGES], device=device))
    state.cursors[Cursor.SCRUB_NEXT :][:SCRUB_WORDS] = torch.tensor(following, device=device)


def _list_next(state: RegionState, place: list[int]) -> list[int]:
    """Lists the next slots in the half not under comparison: running ones up to their share, then parked ones, then
    running ones again, up to ``SCRUB_SLOTS`` in all. The search for each sort goes on from its last place, in physical
    order, no further than ``SCRUB_PASS`` and once round. Returns the `ScrubWord` values of the next scrub."""
    slots = state.region.slots
    most, share, passes = state.cursors[Cursor.SCRUB_SLOTS : Cursor.SCRUB_PASS + 1].clamp(max=slots).tolist()
    following, half = list(place), 1 - (place[ScrubWord.LIST] >> 32)
    listed = 0
    for turn, word in enumerate((ScrubWord.RUNNING, ScrubWord.PARKED, ScrubWord.RUNNING)):
        room = (min(share, most) if turn == 0 else most) - listed
        passed = following[word] - place[word]
        if room <= 0 or passed >= passes:
            continue
        o_slot = torch.arange(following[word], place[word] + passes, device=state.records.device) % slots
        sort = State.WRITTEN | State.PARKED if word is ScrubWord.PARKED else State.WRITTEN
        found = (state.records[o_slot, POSITION] & STATES - 1 - State.ARRIVED == sort).nonzero()[:room, 0]
        state.listed[half, listed : listed + len(found)] = o_slot[found].int()
        # All are passed, unless there is no room for the next one.
        following[word] = following[word] + int(found[-1]) + 1 if len(found) == room else place[word] + passes
        following[word + 1] += len(found)
        listed += len(found)
    following[ScrubWord.LIST] = (half << 32) + listed
    return following


def verify(state: RegionState, slots: Tensor) -> None:
    """Between forwards: compares the bytes of ``slots`` (integer ``[n]``). Reports BYTES. Numbers beyond the region are
    left out."""
    slot = slots.long()
    outside = (slot < 0) | (slot >= state.region.slots)
    nobody = torch.full_like(slot, -1)
    seen = see(state, slot, torch.where(outside, int(Status.RANGE), int(Status.OK)))
    _compare(state, seen, Phase.EVENT, {Row.POSITION: nobody, Row.WRITER: nobody})


def _compare(state: RegionState, seen: Seen, phase: Phase, about: dict[Row, Tensor], probe: int = -1) -> None:
    """Compares bytes, except where a fingerprint is 0 (unknown). ``probe``: the source for which all bits of the first
    slot's fingerprint are inverted; a difference is a `PROBE` there, whatever the record says."""
    written = seen.usable & (seen.state == State.WRITTEN)
    # Nearly all slots that a batch reads or a scrub lists were written, so a kernel looks at the record only where
    # bytes differ.
    asked = written if phase is Phase.EVENT else seen.usable
    for stack in stacks(state):
        compared = asked & stack.like.has_bytes(seen.slot)
        slot = seen.slot[compared]
        value, _ = stack.fold(state, slot)
        stored = state.fingerprints[slot[:, None], stack.columns].T
        probed = torch.zeros_like(stored, dtype=torch.bool)
        probed[:, :1] = (stack.columns == probe)[:, None] & compared[:1]
        stored = torch.where(probed, ~stored, stored)
        alike = (value == stored) & (stored != 0)
        differs = (value != stored) & (((stored != 0) & written[compared]) | probed)
        state.shared.counters[Counter.CHECKED_BYTES] += (alike | differs).sum() * stack.like.slot_bytes
        if bool(differs.any()):
            # Back to the shape of what was seen, for the report.
            mask = torch.zeros(len(stack.columns), len(compared), dtype=torch.bool, device=slot.device)
            found = torch.zeros_like(mask, dtype=torch.int64)
            mask[:, compared], found[:, compared] = differs, value
            step = state.shared.clock[Clock.NEXT] * 8 + phase
            fields = {Row.TOKEN: seen.token, **about, Row.FOUND_VALUE: found, Row.STEP: step}
            of_probe = torch.zeros_like(mask)
            of_probe[:, compared] = probed & differs
            report_bytes(state, seen, stack, {Kind.BYTES: mask & ~of_probe}, fields)
            if bool(of_probe.any()):
                wrong = torch.zeros_like(found)
                wrong[:, compared] = stored
                report_bytes(state, seen, stack, {PROBE: of_probe}, {**fields, Row.STORED_VALUE: wrong})
