"""record: after a forward, records the written slots and checks the forward's input tokens."""

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops import hashing
from canary_core.ops.mapping import int64_words
from canary_core.ops.samples import Samples
from canary_core.ops.state import RegionState
from canary_core.ops.torch import histories, plan, samples
from canary_core.ops.torch.check import expected_tokens
from canary_core.ops.torch.ring import report
from canary_core.records import (
    CHAINS,
    COUNTERS,
    FREED_BY,
    GAUGES,
    POSITION,
    PREFIX_HASH,
    RECORD_WORDS,
    RECORDED,
    SAMPLE_TOKEN_BITS,
    SAMPLE_TOKENS,
    STATES,
    STEP_FREED,
    STEP_WRITTEN,
    TAIL_WORDS,
    TOKEN,
    WRITER,
    Clock,
    Counter,
    Cursor,
    Happened,
    Kind,
    Phase,
    Row,
    State,
    Status,
)


def record(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """Writes the records of all stored new tokens and each row's chain entry; ends the step.

    Reports SLOT_RANGE or NULL_SLOT, WRITE_INPUT, WRITE_SLOT, TWO_WRITERS (the token with the highest index wins; the
    others are reported and not recorded) and WRITE_AFTER_FREE (the slot stays freed).

    Where tokens are compared with the sampler's: WRITE_INPUT also if the forward computed another token than was
    sampled for the position, and TOKEN if one of the last slots that a row reads holds another. Where the batch has the
    request's own token (``expected_tokens``), that decides: an engine may replace what was sampled.
    """
    shared = state.shared
    rows = plan.rows(state.region, batch, table)
    step = shared.clock[Clock.NEXT]
    every = plan.expand(rows.prefix, rows.prefix + rows.new)
    hash = torch.zeros(batch.tokens, dtype=torch.int64, device=batch.device)
    hash[rows.token(every)] = _prefix_hashes(state, batch, rows, every)
    _remember_ends(state, batch, rows, hash)

    writes = plan.planned_writes(state.scratch.plan, batch)
    places = plan.Places(writes.row, writes.position)
    usable = writes.status == Status.OK
    winner = won(state, writes)
    token = batch.token_ids[writes.token].long()
    expected = expected_tokens(batch, rows, places)
    own = plan.last_token(places.position, rows.group)
    position = own if batch.positions is None else batch.positions[writes.token].long()
    claim = state.scratch.claims[torch.where(usable, writes.slot, 0)]
    old = state.records[torch.where(winner, writes.slot, 0)]
    freed = winner & (old[:, POSITION] & State.FREED != 0)
    sample = torch.full_like(token, -1)
    if state.samples is not None:
        sample = samples.sampled(state.samples, batch.writers[writes.row].long(), writes.position)
        differs = (sample >= 0) & (sample != token)
        shared.counters[Counter.SAMPLED_TOKENS] += (sample >= 0).sum()
        shared.counters[Counter.UNSURE] += (differs & (expected == token)).sum()
        sample = torch.where(differs & (expected < 0), sample, -1)
        _judge_tails(state.samples, state, batch, rows)
        samples.note_ends(state.samples, batch)
    findings = {
        Kind.SLOT_RANGE: writes.status == Status.RANGE,
        Kind.NULL_SLOT: writes.status == Status.NULL,
        Kind.WRITE_INPUT: ((expected >= 0) & (expected != token)) | (position != own) | (sample >= 0),
        Kind.WRITE_SLOT: usable & (writes.table_slot >= 0) & (writes.table_slot != writes.slot),
        Kind.TWO_WRITERS: usable & ~winner,
        Kind.WRITE_AFTER_FREE: freed,
    }
    other_value = {
        Kind.WRITE_INPUT: sample,
        Kind.WRITE_SLOT: writes.table_slot,
        Kind.TWO_WRITERS: state.scratch.claiming_token(claim),
    }
    fields = {
        Row.POSITION: places.position,
        Row.TOKEN: expected,
        Row.STORED_TOKEN: token,
        Row.STORED_POSITION: (places.position + position - own) * STATES + State.WRITTEN,
        Row.WRITER: batch.writers[writes.row].long(),
    }
    for kind, mask in findings.items():
        if not bool(mask.any()):
            continue
        chosen: dict[Row, Tensor | int] = {word: value[mask] for word, value in fields.items()}
        if kind in other_value:
            chosen[Row.STORED_VALUE] = other_value[kind][mask]
        if kind is Kind.WRITE_INPUT:
            chosen[Row.TOKEN] = torch.where(sample >= 0, sample, expected)[mask]
        if kind is Kind.WRITE_AFTER_FREE:
            chosen[Row.STORED_WRITER] = old[mask, FREED_BY].long()
            chosen[Row.FREED] = int64_words(old[mask], STEP_FREED)
        about: dict[Row, Tensor | int] = {Row.REGION: state.index, Row.STEP: step * 8 + Phase.POST_FORWARD}
        report(shared, kind, writes.slot[mask], {**chosen, **about})

    new = torch.zeros(int(winner.sum()), RECORD_WORDS, dtype=torch.int32, device=batch.device)
    new[:, TOKEN] = token[winner].int()
    new[:, POSITION] = (places.position[winner] * STATES + State.WRITTEN + freed[winner] * State.FREED).int()
    new[:, PREFIX_HASH : PREFIX_HASH + 2] = hash[writes.token[winner]].view(torch.int32).view(-1, 2)
    new[:, STEP_WRITTEN] = step.int()
    new[:, WRITER] = fields[Row.WRITER][winner].int()
    for word in (STEP_FREED, FREED_BY):
        new[:, word] = torch.where(freed, old[:, word], 0)[winner]
    state.records[writes.slot[winner]] = new
    if state.histories is not None:
        written = histories.entry(state, Happened.WRITE, fields[Row.WRITER][winner])
        histories.push(state.histories, writes.slot[winner], written)
    shared.counters[COUNTERS + state.index * GAUGES + RECORDED] += new.shape[0]
    shared.clock[Clock.STEP] = step
    state.cursors[Cursor.CHECK] = state.cursors[Cursor.CHECK_NEXT]


def _judge_tails(known: Samples, state: RegionState, batch: BatchView, rows: plan.Rows) -> None:
    """Reports a row's last read slots, noted by `check`, if they hold other tokens than the sampled ones."""
    computing = rows.new > 0
    tails = known.tails[: batch.rows][computing].view(-1, TAIL_WORDS)
    row = torch.arange(batch.rows, device=batch.device)[computing].repeat_interleave(SAMPLE_TOKENS)
    there = tails[:, 0] != 0
    (noted, slot, written), row = tails[there].T, row[there]
    position, token = noted >> SAMPLE_TOKEN_BITS, noted % (1 << SAMPLE_TOKEN_BITS)
    writer = batch.writers[row].long()
    sample = samples.sampled(known, writer, position)
    expected = expected_tokens(batch, rows, plan.Places(row, position))
    state.shared.counters[Counter.SAMPLED_TOKENS] += (sample >= 0).sum()
    wrong = (sample >= 0) & (sample != token) & (expected < 0)
    fields = {
        Row.POSITION: position,
        Row.TOKEN: sample,
        Row.STORED_TOKEN: token,
        Row.STORED_POSITION: position * STATES + State.WRITTEN,
        Row.STORED_VALUE: sample,
        Row.WRITER: writer,
        Row.STORED_WRITER: written >> 32,
        Row.STEP_WRITTEN: written & 0xFFFFFFFF,
    }
    chosen: dict[Row, Tensor | int] = {word: value[wrong] for word, value in fields.items()}
    step = state.shared.clock[Clock.NEXT]
    about: dict[Row, Tensor | int] = {Row.REGION: state.index, Row.STEP: step * 8 + Phase.POST_FORWARD}
    report(state.shared, Kind.TOKEN, slot[wrong], {**chosen, **about})


def won(state: RegionState, writes: plan.Writes) -> Tensor:
    """Whether each write goes to a slot of the region and no later token of the batch goes to the same slot."""
    usable = writes.status == Status.OK
    claim = state.scratch.claims[torch.where(usable, writes.slot, 0)]
    return usable & (claim == state.scratch.claim(state.shared.clock[Clock.NEXT], writes.token))


def _prefix_hashes(state: RegionState, batch: BatchView, rows: plan.Rows, places: plan.Places) -> Tensor:
    """Prefix hash of each new token: its row's head plus the mixes up to the token; 0 (unknown) after an unknown
    head."""
    mixes = hashing.mix(batch.token_ids[rows.token(places)], places.position)
    total = mixes.cumsum(0)
    first = rows.new_first[places.row]
    head = state.scratch.heads[places.row]
    before = torch.where(first > 0, total[(first - 1).clamp(min=0)], 0)
    return torch.where(head == 0, 0, head + total - before)


def _remember_ends(state: RegionState, batch: BatchView, rows: plan.Rows, hash: Tensor) -> None:
    writer = batch.writers[: len(rows.new)].long()
    wrote = (rows.new > 0) & (writer >= 0)
    end = rows.prefix + rows.new
    entry = torch.stack((writer << 32 | end, torch.zeros_like(end)), dim=1)
    ends = plan.Places(torch.arange(len(end), device=end.device)[wrote], (end - 1)[wrote])
    entry[wrote, 1] = hash[rows.token(ends)]
    state.chains[writer[wrote] % CHAINS] = entry[wrote]
