"""record: the kernel of `canary_core.ops.torch.record`, one launch over a persistent grid of row tiles.

The prefix hash is a sum, so a tile of new tokens needs the head of its row, the sum of the mixes before the tile (added
up by the same program: no program waits for another) and a scan of its own.
"""

import triton
import triton.language as tl

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.kernels.common import claim_of, mix, report
from canary_core.ops.kernels.fields import OwnTokens
from canary_core.ops.kernels.histories import entry, history_arguments, newest, push
from canary_core.ops.kernels.launch import VARYING, Launcher, batch_arguments, jit, programs, region_arguments
from canary_core.ops.kernels.samples import KEPT, TAIL, TOKEN_BITS, TOKEN_VALUES, note_ends, sample_arguments, sampled
from canary_core.ops.kernels.words import (
    CHAIN_ENTRIES,
    CLAIM_TOKENS,
    CLOCK_NEXT,
    CLOCK_STEP,
    COUNT_SAMPLED_TOKENS,
    COUNT_UNSURE,
    COUNTERS_END,
    CURSOR_CHECK,
    CURSOR_CHECK_NEXT,
    EVENT_WRITE,
    FREED,
    GAUGE_RECORDED,
    KIND_NULL_SLOT,
    KIND_SLOT_RANGE,
    KIND_TOKEN,
    KIND_TWO_WRITERS,
    KIND_WRITE_AFTER_FREE,
    KIND_WRITE_INPUT,
    KIND_WRITE_SLOT,
    PHASE_POST,
    PLAN,
    REGION_GAUGES,
    STATE_VALUES,
    STATUS_NULL,
    STATUS_OK,
    STATUS_RANGE,
    WRITTEN,
)
from canary_core.ops.state import RegionState

TILE = 256
"""New tokens recorded at a time by a program."""
TILES_AT_ONCE = tl.constexpr(8)
"""Number of earlier tiles whose tokens a program loads together."""
WARPS = 8
PROGRAMS_PER_PROCESSOR = 2


def record(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.ops.torch.record.record`. One launch; may be captured."""
    given, launches = batch_arguments(state, batch, table)
    launcher = launches.by_op.get("record")
    if launcher is None:
        every = {"TABLE": launches.constants, "TILE": TILE}
        fixed = (region_arguments(state), sample_arguments(state), history_arguments(state))
        columns = programs(state, PROGRAMS_PER_PROCESSOR)
        launcher = Launcher(record_kernel, state, fixed, every, columns, num_warps=WARPS)
        launches.by_op["record"] = launcher
    launcher((launcher.columns, 1), given)


@jit(*VARYING)
def record_kernel(
    region, samples, p_histories, batch, p_expected, table, p_write_slots,
    expected_width, expected_stride, width, table_stride, extent, map_length, write_length, rows, tokens,
    TABLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs."""
    own_tokens = OwnTokens(p_tokens=p_expected, width=expected_width, stride=expected_stride)
    record_written(
        region, samples, p_histories, batch, own_tokens, rows, tokens, tl.program_id(0), tl.num_programs(0),
        TABLE, TILE,
    )  # fmt: skip


@triton.jit
def record_written(
    region, samples, p_histories, batch, own_tokens, rows, tokens, i_program, n_programs,
    TABLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The work of one of ``n_programs`` programs, which share the tiles of all rows' new tokens."""
    GROUP: tl.constexpr = TABLE.GROUP
    o_row = tl.arange(0, TABLE.ROWS)
    b_prefix = tl.maximum(tl.load(batch.p_prefix + o_row, mask=o_row < rows, other=0).to(tl.int32), 0)
    b_new = tl.maximum(tl.load(batch.p_new + o_row, mask=o_row < rows, other=0).to(tl.int32), 0)
    b_token_first = tl.cumsum(b_new, 0) - b_new
    b_new = tl.minimum(b_new, tl.maximum(tokens - b_token_first, 0))
    b_computed = b_new
    # Positions count slots, of GROUP tokens each.
    b_new = (b_prefix + b_new) // GROUP - b_prefix // GROUP
    b_tiles = (b_new + TILE - 1) // TILE
    b_tile_end = tl.cumsum(b_tiles, 0)
    step = tl.load(region.p_clock + CLOCK_NEXT)
    if i_program == 0:
        tl.store(region.p_clock + CLOCK_STEP, step)
        tl.store(region.p_cursors + CURSOR_CHECK, tl.load(region.p_cursors + CURSOR_CHECK_NEXT))
        if samples.p_samples is not None:
            note_ends(samples, batch.p_writers, b_prefix, b_computed, o_row, rows)

    for i in range(i_program, tl.sum(b_tiles, 0), n_programs):
        i_row = tl.sum((b_tile_end <= i).to(tl.int32), 0)
        i_tile = i - tl.max(tl.where(b_tile_end <= i, b_tile_end, 0), 0)
        new = tl.sum(tl.where(o_row == i_row, b_new, 0), 0).to(tl.int64)
        token_first = tl.sum(tl.where(o_row == i_row, b_token_first, 0), 0).to(tl.int64)
        raw_prefix = tl.maximum(tl.load(batch.p_prefix + i_row).to(tl.int64), 0)
        prefix = raw_prefix // GROUP
        token_zero = token_first - raw_prefix
        writer = tl.load(batch.p_writers + i_row).to(tl.int64)
        head = tl.load(region.p_heads + i_row)

        # Tokens of many tiles at once: one tile after the other, each would wait for memory.
        b_before = tl.zeros((TILES_AT_ONCE * TILE,), tl.int64)
        for i_before in range(0, i_tile, TILES_AT_ONCE):
            o_before = i_before * TILE + tl.arange(0, TILES_AT_ONCE * TILE).to(tl.int64)
            m_before = o_before < i_tile * TILE
            p_token = batch.p_tokens + token_zero + (prefix + o_before + 1) * GROUP - 1
            b_token = tl.load(p_token, mask=m_before, other=0).to(tl.int64)
            b_before += tl.where(m_before, mix(b_token, prefix + o_before), 0)

        o_new = i_tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        m = o_new < new
        position = prefix + o_new
        own = (position + 1) * GROUP - 1
        o_token = token_zero + own
        token = tl.load(batch.p_tokens + o_token, mask=m, other=0).to(tl.int64)
        b_mix = tl.where(m, mix(token, position), 0)
        hash = head + tl.sum(b_before, 0) + tl.cumsum(b_mix, 0)
        hash = tl.where(head == 0, 0, hash)

        # Not a block's mask & a scalar's: Triton 3.9's interpreter makes no mask of that.
        last = m & (o_new == tl.where(writer >= 0, new - 1, -1))
        p_entry = region.p_chains + (tl.maximum(writer, 0) % CHAIN_ENTRIES) * 2 + tl.zeros_like(position)
        tl.store(p_entry, (writer << 32) | (position + 1), mask=last)
        tl.store(p_entry + 1, hash, mask=last)

        word = tl.load(region.p_plan + o_token * PLAN, mask=m, other=0)
        slot = tl.load(region.p_plan + o_token * PLAN + 1, mask=m, other=0)
        planned = word != 0
        status = (word >> 32) - 1
        usable = planned & (status == STATUS_OK)
        claim = tl.load(region.p_claims + slot, mask=usable, other=0)
        won = usable & (claim == claim_of(step, o_token))
        p_record = region.p_records + slot * 4
        if p_histories is not None:
            first, second, third = newest(p_histories, slot, won)
        freed_bit = (tl.load(p_record, mask=won, other=0) >> 32) & FREED
        old_freed = tl.where(freed_bit != 0, tl.load(p_record + 3, mask=won, other=0), 0)
        tl.store(p_record, (token & 0xFFFFFFFF) | ((position * STATE_VALUES + WRITTEN + freed_bit) << 32), mask=won)
        tl.store(p_record + 1, hash, mask=won)
        tl.store(p_record + 2, (step & 0xFFFFFFFF) | (writer << 32), mask=won)
        tl.store(p_record + 3, old_freed, mask=won)
        if p_histories is not None:
            new_entry = entry(EVENT_WRITE, tl.zeros_like(slot) + writer, step)
            push(p_histories, slot, new_entry, first, second, third, won)
        p_recorded = region.p_counters + COUNTERS_END + region.index * REGION_GAUGES + GAUGE_RECORDED
        tl.atomic_add(p_recorded, tl.sum(won.to(tl.int64), 0))

        expected = tl.full((TILE,), -1, tl.int64)
        if own_tokens.p_tokens is not None:
            p_token = own_tokens.p_tokens + i_row.to(tl.int64) * own_tokens.stride + own
            expected = tl.load(p_token, mask=planned & (own < own_tokens.width), other=-1).to(tl.int64)
        given = own
        if batch.p_positions is not None:
            given = tl.load(batch.p_positions + o_token, mask=planned, other=0).to(tl.int64)
        table_slot = tl.load(region.p_plan + o_token * PLAN + 3, mask=planned, other=-1)
        wrong = planned & (((expected >= 0) & (expected != token)) | (given != own))
        sample = tl.full((TILE,), -1, tl.int64)
        if samples.p_samples is not None:
            sample = sampled(samples, writer, position, planned)
            differs = (sample >= 0) & (sample != token)
            n_sampled = tl.sum((sample >= 0).to(tl.int64), 0)
            if n_sampled > 0:
                tl.atomic_add(region.p_counters + COUNT_SAMPLED_TOKENS, n_sampled)
            n_unsure = tl.sum((differs & (expected == token)).to(tl.int64), 0)
            if n_unsure > 0:
                tl.atomic_add(region.p_counters + COUNT_UNSURE, n_unsure)
            sample = tl.where(differs & (expected < 0), sample, -1)
            wrong = wrong | (sample >= 0)
            if i_tile == 0:
                judge_tail(region, samples, own_tokens, i_row, writer, step)
        elsewhere = usable & (table_slot >= 0) & (table_slot != slot)
        lost = usable & (won == 0)
        freed = won & (freed_bit != 0)
        bad = (planned & (status != STATUS_OK)) | wrong | elsewhere | lost | freed
        if tl.sum(bad.to(tl.int32), 0) > 0:
            report_tokens(
                region, slot, position, token, expected, sample, given - own, table_slot, old_freed, claim, planned,
                status, wrong, elsewhere, lost, freed, writer, step, TILE,
            )  # fmt: skip


@triton.jit
def report_tokens(
    region, slot, position, token, expected, sample, moved, table_slot, old_freed, claim, planned, status, wrong,
    elsewhere, lost, freed, writer, step,
    TILE: tl.constexpr,
):  # fmt: skip
    """Reports a tile's tokens. A token may have several findings, so each kind is reported by itself; in a loop, since
    Triton takes long to compile a report."""
    none = tl.full((TILE,), -1, tl.int64)
    for i_kind in range(6):
        input, again = i_kind == 2, i_kind == 5
        kind, m_kind, value = none * 0 + KIND_SLOT_RANGE, planned & (status == STATUS_RANGE), none
        kind = tl.where(i_kind == 1, KIND_NULL_SLOT, kind)
        m_kind = tl.where(i_kind == 1, planned & (status == STATUS_NULL), m_kind)
        kind = tl.where(input, KIND_WRITE_INPUT, kind)
        m_kind = tl.where(input, wrong, m_kind)
        value = tl.where(input, sample, value)
        kind = tl.where(i_kind == 3, KIND_WRITE_SLOT, kind)
        m_kind = tl.where(i_kind == 3, elsewhere, m_kind)
        value = tl.where(i_kind == 3, table_slot, value)
        kind = tl.where(i_kind == 4, KIND_TWO_WRITERS, kind)
        m_kind = tl.where(i_kind == 4, lost, m_kind)
        value = tl.where(i_kind == 4, (claim & CLAIM_TOKENS) - 1, value)
        kind = tl.where(again, KIND_WRITE_AFTER_FREE, kind)
        m_kind = tl.where(again, freed, m_kind)
        report(
            region, kind, m_kind, -1, slot, position, tl.where(input & (sample >= 0), sample, expected), token,
            (position + moved) * STATE_VALUES + WRITTEN, value, -1, writer, tl.where(again, old_freed >> 32, -1), -1,
            tl.where(again, old_freed, -1), step * 8 + PHASE_POST,
        )  # fmt: skip


@triton.jit
def judge_tail(region, samples, own_tokens, i_row, writer, step):
    """Judges and reports a row's last read slots, noted by `check`."""
    o_last = tl.arange(0, KEPT).to(tl.int64)
    p_tail = samples.p_tails + (i_row.to(tl.int64) * KEPT + o_last) * TAIL
    tail = tl.load(p_tail)
    position, token = tail >> TOKEN_BITS, tail & (TOKEN_VALUES - 1)
    sample = sampled(samples, writer, position, tail != 0)
    expected = tl.full((KEPT,), -1, tl.int64)
    if own_tokens.p_tokens is not None:
        p_token = own_tokens.p_tokens + i_row.to(tl.int64) * own_tokens.stride + position
        expected = tl.load(p_token, mask=(sample >= 0) & (position < own_tokens.width), other=-1).to(tl.int64)
    # Where the batch has the request's own token, `check` has judged the slot by that.
    wrong = (sample >= 0) & (sample != token) & (expected < 0)
    n_sampled = tl.sum((sample >= 0).to(tl.int64), 0)
    if n_sampled > 0:
        tl.atomic_add(region.p_counters + COUNT_SAMPLED_TOKENS, n_sampled)
    if tl.sum(wrong.to(tl.int32), 0) > 0:
        written = tl.load(p_tail + 2)
        report(
            region, tl.full((KEPT,), KIND_TOKEN, tl.int64), wrong, -1, tl.load(p_tail + 1), position, sample, token,
            position * STATE_VALUES + WRITTEN, sample, -1, writer, written >> 32, written.to(tl.int32).to(tl.int64), -1,
            step * 8 + PHASE_POST,
        )  # fmt: skip
