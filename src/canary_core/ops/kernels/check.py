"""check: the kernel of `canary_core.ops.torch.check`, one launch over a persistent grid.

No plan of the reads is ever stored: each program works out from the batch's lengths which (row, tile) a number stands
for. A tile is first judged as a whole from two loads a slot (its record's first 16 bytes); only a tile with something
wrong or unknown is judged again slot by slot, with the record before each.
"""

import triton.language as tl

from canary_core.batch import BatchView, SlotTable
from canary_core.ops import hashing, readers
from canary_core.ops.kernels.common import (
    claim_of,
    load_head,
    lookup,
    readable,
    resolve,
    split_head,
)
from canary_core.ops.kernels.fields import OwnTokens, TablePlaces
from canary_core.ops.kernels.judge import JUDGED_TILE, ended_at, is_suspect, judge
from canary_core.ops.kernels.launch import (
    VARYING,
    Launcher,
    batch_arguments,
    jit,
    programs,
    region_arguments,
    register_limit,
)
from canary_core.ops.kernels.readers import check_long, may_be_long
from canary_core.ops.kernels.samples import note_tail, remember, sample_arguments
from canary_core.ops.kernels.words import (
    CLOCK_NEXT,
    CLOCK_STEP,
    COUNT_CHECKED_FORWARDS,
    COUNT_CHECKED_SLOTS,
    CURSOR_CHECK,
    CURSOR_CHECK_NEXT,
    CURSOR_CHECK_TILES,
    CURSOR_READ,
    CURSOR_READ_TILES,
    CURSOR_SCRUB,
    CURSOR_SCRUB_NEXT,
    PLAN,
    PLANNED_RECORD,
    READ_WORD,
    SCRUB_PLACE,
    STATE_VALUES,
    STATUS_OK,
    STATUS_RANGE,
    WRITTEN,
)
from canary_core.ops.state import RegionState
from canary_core.records import CHECK_TILE, READ_TILE

TILE = CHECK_TILE
"""Slots checked at a time by a program."""
WARPS = 4
REGISTERS = 80
PROGRAMS_PER_PROCESSOR = 6

ANCHOR = tl.constexpr(hashing.COMMON_ANCHOR)
READ_CHECK_TILE = tl.constexpr(READ_TILE)
NOTHING = tl.constexpr(-1)
FIELD_BITS = tl.constexpr(21)
FIELD = tl.constexpr((1 << 21) - 1)
"""A count in the packed scan: up to 2 million tiles of each sort, and as many new tokens, in one forward."""


def check(state: RegionState, batch: BatchView, table: SlotTable) -> None:
    """As `canary_core.ops.torch.check.check`. One launch, and one more where a forward may be so long that rows share
    spans (`canary_core.ops.readers`); may be captured."""
    given, launches = batch_arguments(state, batch, table)
    split = may_be_long(state, batch, table, TILE)
    op = "check, but long" if split else "check"
    launcher = launches.by_op.get(op)
    if launcher is None:
        tile = {"TILE": TILE, "JUDGED": min(TILE, JUDGED_TILE), "SHORT": 2 * readers.SPANS if split else 0}
        options = {"num_warps": WARPS, **register_limit(state, REGISTERS)}
        fixed, columns = (region_arguments(state), sample_arguments(state)), programs(state, PROGRAMS_PER_PROCESSOR)
        launcher = Launcher(check_kernel, state, fixed, {"TABLE": launches.constants} | tile, columns, **options)
        launches.by_op[op] = launcher
    launcher((launcher.columns, 1), given)
    if split:
        check_long(state, given, launches, TILE)


@jit(*VARYING)
def check_kernel(
    region, samples, batch, p_expected, table, p_write_slots,
    expected_width, expected_stride, width, table_stride, extent, map_length, write_length, rows, tokens,
    TABLE: tl.constexpr, TILE: tl.constexpr, JUDGED: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs. Work items in order: tiles of readable slots, tiles of new tokens (at least one per
    row, for the head), tiles of ``token_ids`` outside of every row. The readable slots of a forward with `SHORT` tiles
    or more of them are left to `readers.check_long_kernel`; 0: there is none."""
    GROUP: tl.constexpr = TABLE.GROUP
    RING_PAGE: tl.constexpr = TABLE.RING_PAGE
    own_tokens = OwnTokens(p_tokens=p_expected, width=expected_width, stride=expected_stride)
    places = TablePlaces(
        p_entries=table.p_entries, width=width, extent=extent, p_map=table.p_map,
        map_length=map_length, slots=region.slots, null_first=region.null_first, null_end=region.null_end,
    )  # fmt: skip
    o_row = tl.arange(0, TABLE.ROWS)
    m_row = o_row < rows
    b_prefix = tl.maximum(tl.load(batch.p_prefix + o_row, mask=m_row, other=0).to(tl.int32), 0)
    b_raw_new = tl.minimum(tl.maximum(tl.load(batch.p_new + o_row, mask=m_row, other=0).to(tl.int32), 0), tokens)
    # Positions count slots, of GROUP tokens each.
    b_prefix = b_prefix // GROUP
    b_count = b_prefix
    if TABLE.WINDOW > 0:
        b_count = readable(b_prefix, tl.load(batch.p_new + o_row, mask=m_row, other=0), TABLE)
    # Tiles to read, tiles to write and new tokens of each row share an int64, so that one scan counts all three.
    b_read_tiles = ((b_count + TILE - 1) // TILE).to(tl.int64)
    b_write_tiles = tl.where(m_row, tl.maximum((b_raw_new + TILE - 1) // TILE, 1), 0).to(tl.int64)
    b_packed = b_read_tiles | (b_write_tiles << FIELD_BITS) | (b_raw_new.to(tl.int64) << (2 * FIELD_BITS))
    b_end = tl.cumsum(b_packed, 0)
    total = tl.max(b_end, 0)
    n_read = (total & FIELD).to(tl.int32)
    n_write = ((total >> FIELD_BITS) & FIELD).to(tl.int32)
    all_new = tl.minimum((total >> (2 * FIELD_BITS)).to(tl.int32), tokens)
    n_rest = (tokens - all_new + TILE - 1) // TILE
    b_read_end = (b_end & FIELD).to(tl.int32)
    b_write_end = ((b_end >> FIELD_BITS) & FIELD).to(tl.int32)
    check_first = tl.load(region.p_cursors + CURSOR_CHECK).to(tl.int32)
    n_check = tl.minimum(tl.load(region.p_cursors + CURSOR_CHECK_TILES), n_read.to(tl.int64)).to(tl.int32)
    step = tl.load(region.p_clock + CLOCK_STEP) + 1

    if tl.program_id(0) == 0:
        tl.store(region.p_clock + CLOCK_NEXT, step)
        tl.atomic_add(region.p_counters + COUNT_CHECKED_FORWARDS, 1)
        o_scrub = tl.arange(0, SCRUB_PLACE)
        tl.store(region.p_cursors + CURSOR_SCRUB + o_scrub, tl.load(region.p_cursors + CURSOR_SCRUB_NEXT + o_scrub))
        tl.store(region.p_cursors + CURSOR_CHECK_NEXT, (check_first + n_check) % tl.maximum(n_read, 1))
        n_tiles = tl.sum(((b_count + READ_CHECK_TILE - 1) // READ_CHECK_TILE).to(tl.int64), 0)
        read = tl.load(region.p_cursors + CURSOR_READ) + tl.minimum(
            tl.load(region.p_cursors + CURSOR_READ_TILES), n_tiles
        )
        tl.store(region.p_cursors + CURSOR_READ, read % tl.maximum(n_tiles, 1))
        if samples.p_samples is not None:
            remember(samples)

    if SHORT > 0:
        n_check = tl.where((n_read >= SHORT) & (n_check == n_read), 0, n_check)
    checked = tl.zeros((), tl.int64)
    for i in range(tl.program_id(0), n_check + n_write + n_rest, tl.num_programs(0)):
        if i < n_check:
            i_read = (check_first + i) % n_read
            place = tl.sum(tl.where(b_read_end <= i_read, (b_read_tiles << FIELD_BITS) + 1, 0), 0)
            i_row = (place & FIELD).to(tl.int32)
            i_tile = i_read - (place >> FIELD_BITS).to(tl.int32)
            prefix = tl.maximum(tl.load(batch.p_prefix + i_row).to(tl.int64), 0) // GROUP
            read_first = tl.zeros_like(prefix)
            if TABLE.WINDOW > 0:
                read_first = prefix - readable(prefix, tl.load(batch.p_new + i_row), TABLE)
            writer = tl.load(batch.p_writers + i_row).to(tl.int64)
            anchor = ANCHOR + tl.zeros_like(prefix)
            if batch.p_anchors is not None:
                anchor = tl.load(batch.p_anchors + i_row)
            row_first = i_row.to(tl.int64)
            if table.p_rows is not None:
                row_first = tl.load(table.p_rows + i_row).to(tl.int64)
            row_first = row_first * table_stride
            start = read_first + i_tile.to(tl.int64) * TILE
            end = tl.minimum(start + TILE, prefix)
            checked += end - start
            suspect = is_suspect(
                region, own_tokens, places, start, end, prefix, read_first, i_row, row_first, writer, anchor, TABLE,
                TILE,
            )  # fmt: skip
            if suspect:
                chain_hash, chained = ended_at(region, writer, prefix)
                for first_of in range(0, TILE, JUDGED):
                    judge(
                        region, own_tokens, places, start + first_of + tl.arange(0, JUDGED).to(tl.int64), end,
                        prefix, read_first, i_row, row_first, writer, anchor, chain_hash, chained, step, TABLE, JUDGED,
                        True,
                    )  # fmt: skip

        elif i < n_check + n_write:
            i_write = i - n_check
            place = tl.sum(tl.where(b_write_end <= i_write, (b_packed >> FIELD_BITS << FIELD_BITS) + 1, 0), 0)
            i_row = (place & FIELD).to(tl.int32)
            i_tile = i_write - ((place >> FIELD_BITS) & FIELD).to(tl.int32)
            token_first = place >> (2 * FIELD_BITS)
            raw_prefix = tl.maximum(tl.load(batch.p_prefix + i_row).to(tl.int64), 0)
            raw_new = tl.maximum(tl.load(batch.p_new + i_row).to(tl.int64), 0)
            # Rows whose tokens do not fit into token_ids are cut.
            raw_new = tl.minimum(raw_new, tl.maximum(tokens - token_first, 0))
            prefix = raw_prefix // GROUP
            new = (raw_prefix + raw_new) // GROUP - prefix
            row_first = i_row.to(tl.int64)
            if table.p_rows is not None:
                row_first = tl.load(table.p_rows + i_row).to(tl.int64)
            row_first = row_first * table_stride
            if i_tile == 0:
                anchor = ANCHOR + tl.zeros_like(prefix)
                if batch.p_anchors is not None:
                    anchor = tl.load(batch.p_anchors + i_row)
                head_position = tl.maximum(prefix - 1, 0)
                head_slot, head_status = lookup(places, row_first, head_position, prefix > 0, TABLE)
                head_usable = (prefix > 0) & (head_status == STATUS_OK)
                head_first, head = load_head(region.p_records, head_slot, head_usable)
                _, head_stored = split_head(head_first)
                writer = tl.load(batch.p_writers + i_row).to(tl.int64)
                chain_hash, chained = ended_at(region, writer, prefix)
                holds = head_usable & ((head_stored & READ_WORD) == head_position * STATE_VALUES + WRITTEN)
                head = tl.where(holds, head, tl.where(chained, chain_hash, 0))
                tl.store(region.p_heads + i_row, tl.where(prefix == 0, anchor, head))
                if samples.p_samples is not None:
                    read_first = tl.zeros_like(prefix)
                    if TABLE.WINDOW > 0:
                        read_first = prefix - readable(prefix, tl.load(batch.p_new + i_row), TABLE)
                    note_tail(region, samples, places, row_first, prefix, read_first, i_row, TABLE)

            o_new = i_tile.to(tl.int64) * TILE + tl.arange(0, TILE)
            m = o_new < raw_new
            o_token = token_first + o_new
            position = (raw_prefix + o_new + 1) // GROUP - 1
            m_stored = m & ((raw_prefix + o_new + 1) % GROUP == 0)
            if TABLE.STORED > 0:
                last = position - prefix >= tl.maximum(new - TABLE.STORED, 0)
                if RING_PAGE > 0:
                    last = last | (position % RING_PAGE >= RING_PAGE - TABLE.RING_ROWS)
                m_stored = m_stored & last
            if p_write_slots is not None:
                listed = o_token < write_length
                number = tl.load(p_write_slots + o_token, mask=m_stored & listed, other=-1).to(tl.int64)
                slot, status = resolve(number, places, m_stored & listed, TABLE)
                slot = tl.where(listed, slot, -1)
                status = tl.where(listed, status, STATUS_RANGE)
                found, found_status = lookup(places, row_first, position, m_stored, TABLE)
                table_slot = tl.where(found_status == STATUS_OK, found, -1)
            else:
                table_slot = tl.full((TILE,), -1, tl.int64)
                slot, status = lookup(places, row_first, position, m_stored, TABLE)
            word = ((status.to(tl.int64) + 1) << 32) | i_row.to(tl.int64)
            p_entry = region.p_plan + o_token * PLAN
            tl.store(p_entry, tl.where(m_stored, word, 0), mask=m)
            tl.store(p_entry + 1, tl.where(m_stored, slot, 0), mask=m)
            tl.store(p_entry + 2, tl.where(m_stored, position, 0), mask=m)
            tl.store(p_entry + 3, tl.where(m_stored, table_slot, 0), mask=m)
            usable = m_stored & (status == STATUS_OK)
            for i_word in tl.static_range(PLAN - PLANNED_RECORD):
                old = tl.load(region.p_records + slot * 4 + i_word, mask=usable, other=0)
                tl.store(p_entry + PLANNED_RECORD + i_word, old, mask=m)
            claim = claim_of(step, o_token)
            tl.atomic_max(region.p_claims + slot, claim, mask=usable)

        else:
            o_token = all_new + (i - n_check - n_write) * TILE + tl.arange(0, TILE).to(tl.int64)
            m = o_token < tokens
            for word in tl.static_range(PLAN):
                tl.store(region.p_plan + o_token * PLAN + word, tl.zeros_like(o_token), mask=m)
    tl.atomic_add(region.p_counters + COUNT_CHECKED_SLOTS, checked)
