"""record: after a forward, remember what it wrote to each slot, and check what it was given to write."""

import torch
from torch import Tensor

from canary_core import hashing
from canary_core.batch import BatchView, SlotTable
from canary_core.records import (
    CHAINS,
    FREED_BY,
    POSITION,
    PREFIX_HASH,
    STEP_FREED,
    STEP_WRITTEN,
    TOKEN,
    WRITER,
    Clock,
    Counter,
    Kind,
    Phase,
    Row,
    State,
)
from canary_core.reference import plan
from canary_core.reference.check import expected_tokens, record_fields, see
from canary_core.reference.ring import report
from canary_core.state import RegionState


def record(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """Writes the records of all stored new tokens and each row's chain entry; ends the step.

    Reports SLOT_RANGE or NULL_SLOT, WRITE_INPUT, WRITE_SLOT, and TWO_WRITERS (the token with the highest index wins;
    the others are reported and not recorded).
    """
    shared = state.shared
    rows = plan.rows(state.region, batch, table, state.max_rows)
    step = shared.clock[Clock.NEXT]
    every = plan.expand(rows.prefix, rows.prefix + rows.new)
    hash = _prefix_hashes(state, batch, rows, every)
    _remember_ends(state, batch, rows, hash)

    stored = every.position >= rows.stored_first[every.row]
    places, hash = plan.Places(every.row[stored], every.position[stored]), hash[stored]
    index = plan.token_index(rows, places)
    slot, status = plan.write_slots(state.region, table, places, index)
    usable = status == plan.OK
    token = batch.token_ids[index].long()
    writer = batch.writers[places.row].long()
    expected = expected_tokens(batch, places)
    position = places.position if batch.positions is None else batch.positions[index].long()
    wrong_input = ((expected >= 0) & (expected != token)) | (position != places.position)
    read_slot, read_status = plan.lookup(state.region, table, places)
    elsewhere = usable & (read_status == plan.OK) & (read_slot != slot)
    claim = state.claims[torch.where(usable, slot, 0)]
    won = claim == (step << 32) + index + 1

    none = torch.full_like(slot, -1)
    old = record_fields(see(state, slot, status))
    common = {Row.POSITION: places.position, Row.TOKEN: expected, Row.WRITER: writer, Row.FOUND_VALUE: none}
    given = {Row.STORED_TOKEN: token, Row.STORED_POSITION: position * 4 + State.WRITTEN, Row.STORED_VALUE: none}
    fresh = {Row.SLOT: slot, Row.STORED_WRITER: none, Row.STEP_WRITTEN: none, Row.STEP_FREED: none, **given}
    findings = [
        (Kind.SLOT_RANGE, status == plan.RANGE, fresh),
        (Kind.NULL_SLOT, status == plan.NULL, fresh),
        (Kind.WRITE_INPUT, wrong_input, fresh),
        (Kind.WRITE_SLOT, elsewhere, {**old, Row.STORED_VALUE: read_slot}),
        (Kind.TWO_WRITERS, usable & ~won, {**old, Row.STORED_VALUE: (claim & 0xFFFFFFFF) - 1}),
    ]
    for kind, mask, fields in findings:
        chosen = {word: value[mask] for word, value in {**common, **fields}.items()}
        report(shared, kind, {**chosen, Row.REGION: state.index, Row.STEP: step * 8 + Phase.POST_FORWARD})

    keep = usable & won
    new = torch.zeros(int(keep.sum()), state.records.shape[1], dtype=torch.int32, device=slot.device)
    new[:, TOKEN] = token[keep].int()
    new[:, POSITION] = (places.position[keep] * 4 + State.WRITTEN).int()
    new[:, PREFIX_HASH : PREFIX_HASH + 2] = hash[keep].contiguous().view(torch.int32).view(-1, 2)
    new[:, STEP_WRITTEN] = step.int()
    new[:, WRITER] = writer[keep].int()
    new[:, STEP_FREED] = 0
    new[:, FREED_BY] = 0
    state.records[slot[keep]] = new
    shared.counters[Counter.RECORDED_SLOTS] += new.shape[0]
    shared.clock[Clock.STEP] = step


def _prefix_hashes(state: RegionState, batch: BatchView, rows: plan.Rows, places: plan.Places) -> Tensor:
    """Prefix hash of each new token: its row's head plus the mixes up to it; 0 (unknown) after an unknown head."""
    mixes = hashing.mix(batch.token_ids[plan.token_index(rows, places)], places.position)
    total = mixes.cumsum(0)
    first = (rows.new.cumsum(0) - rows.new)[places.row]
    head = state.heads[places.row]
    before = torch.where(first > 0, total[(first - 1).clamp(min=0)], 0)
    return torch.where(head == 0, 0, head + total - before)


def _remember_ends(state: RegionState, batch: BatchView, rows: plan.Rows, hash: Tensor) -> None:
    writer = batch.writers[: len(rows.new)].long()
    wrote = (rows.new > 0) & (writer >= 0)
    end = rows.prefix + rows.new
    entry = torch.stack((writer << 32 | end, torch.zeros_like(end)), dim=1)
    entry[wrote, 1] = hash[(rows.new.cumsum(0) - 1)[wrote]]
    state.chains[writer[wrote] % CHAINS] = entry[wrote]
