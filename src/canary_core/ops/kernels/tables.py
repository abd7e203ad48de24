"""compare_tables: the kernel of `canary_core.ops.torch.tables`, one launch over a persistent grid."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from canary_core.batch import SlotTable
from canary_core.ops.kernels.common import report, report_record, resolve
from canary_core.ops.kernels.fields import Space
from canary_core.ops.kernels.launch import Launcher, arguments, jit, programs, region_arguments
from canary_core.ops.kernels.words import CLOCK_STEP, KIND_READ_LENGTH, KIND_READ_TABLE, PHASE_PRE, STATUS_OK
from canary_core.ops.launches import Arguments, Launch, Numbers
from canary_core.ops.state import RegionState
from canary_core.read_table import MOST_LENS, ReadTable

TILE = 512
"""Positions compared at a time by a program."""
PARTS = 16
"""Programs per row: each takes every 16th tile, so that one long request is shared."""
WARPS = 4
PROGRAMS_PER_PROCESSOR = 4

NAMES = (4, 5, 6)
"""The places of ``name``, ``lens_name`` and ``other_name`` among the arguments of a launch."""

VARYING = (
    "rows", "name", "lens_name", "other_name", "common", "map_length", "kept_width", "kept_stride", "kept_extent",
    "kept_page", "kept_ring", "given_width", "given_stride", "given_extent", "given_page", "given_ring", "lens_begins",
    "other_begins",
)  # fmt: skip


def compare_tables(state: RegionState, table: ReadTable, names: Sequence[int], wait: bool = True) -> bool:
    """As `canary_core.ops.torch.tables.compare_tables`. One launch; never reads back. Not every form of an engine's
    tables is compiled at start: without ``wait`` compilation begins beside the engine, and nothing is launched
    meanwhile."""
    launcher, given = _launch(state, table)
    grid = programs(state, PROGRAMS_PER_PROCESSOR), 1
    if not wait and not launcher.ready(grid, given):
        return False
    launcher(grid, _named(given, names))
    return True


def _launch(state: RegionState, table: ReadTable) -> tuple[Launch, Arguments]:
    """The launch, and its arguments with 0 for each name."""
    region = state.region
    kept = Numbers.of(table.kept.pool_page, region.page_ring)
    given = Numbers.of(None, None) if table.own_slots else Numbers.of(table.given.pool_page, region.page_ring)
    key = f"compare_tables {kept} {given} {table.own_slots}"
    launcher = state.launches.by_op.get(key)
    if launcher is None:
        constants = {
            "KEPT": kept, "GIVEN": given, "OWN_SLOTS": table.own_slots, "TILE": TILE, "PARTS": PARTS
        }  # fmt: skip
        launcher = Launcher(compare_tables_kernel, state, (region_arguments(state),), constants, num_warps=WARPS)
        state.launches.by_op[key] = launcher
    slot_map = region.slot_map
    lens: list[Tensor | int | None] = []
    for one in table.lens:
        lens += [one.given, one.expected, int(one.begins)]
    lens += [None, None, 0] * (MOST_LENS - len(table.lens))
    passed = arguments(
        table.first, table.end, table.writers, table.rows, *[0] * len(NAMES), table.common, slot_map,
        0 if slot_map is None else len(slot_map), *_of(table.kept), *_of(table.given), *lens,
    )  # fmt: skip
    return launcher, passed


def _named(given: Arguments, names: Sequence[int]) -> Arguments:
    """``given`` with other ``names``, without further compilation."""
    objects, raw = list(given.objects), list(given.raw)
    for place, name in zip(NAMES, names, strict=False):
        objects[place] = raw[place] = name
    return Arguments(tuple(objects), raw, given.kind)


def _of(table: SlotTable) -> tuple[Tensor | int | None, ...]:
    """``p_entries, p_rows, width, stride, extent, page, ring``."""
    return table.entries, table.rows, *table.bounds, table.page_size, table.ring_slots


@jit(*VARYING)
def compare_tables_kernel(
    region, p_first, p_end, p_writers, rows, name, lens_name, other_name, common, p_map, map_length,
    p_kept, p_kept_rows, kept_width, kept_stride, kept_extent, kept_page, kept_ring,
    p_given, p_given_rows, given_width, given_stride, given_extent, given_page, given_ring,
    p_lens, p_lens_expected, lens_begins, p_other, p_other_expected, other_begins,
    KEPT: tl.constexpr, GIVEN: tl.constexpr, OWN_SLOTS: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs. Work items: `PARTS` of each row; for lengths, tiles of rows."""
    space = Space(
        p_map=p_map, map_length=map_length, slots=region.slots, null_first=region.null_first, null_end=region.null_end
    )
    own = Space(p_map=None, map_length=0, slots=region.slots, null_first=region.null_first, null_end=region.null_end)
    step = tl.load(region.p_clock + CLOCK_STEP) + 1
    if p_lens is not None:
        compare_lens(region, p_writers, rows, p_lens, p_lens_expected, lens_begins, lens_name, step, TILE)
    if p_other is not None:
        compare_lens(region, p_writers, rows, p_other, p_other_expected, other_begins, other_name, step, TILE)
    for i in range(tl.program_id(0), rows * PARTS, tl.num_programs(0)):
        i_row = i // PARTS
        first = tl.maximum(tl.load(p_first + i_row).to(tl.int64), 0)
        end = tl.load(p_end + i_row).to(tl.int64)
        writer = tl.load(p_writers + i_row).to(tl.int64)
        kept_row = i_row.to(tl.int64)
        if p_kept_rows is not None:
            kept_row = tl.load(p_kept_rows + i_row).to(tl.int64)
        given_row = i_row.to(tl.int64)
        first_row = tl.zeros_like(given_row)
        if p_given_rows is not None:
            given_row = tl.load(p_given_rows + i_row).to(tl.int64)
            first_row = tl.load(p_given_rows).to(tl.int64)
        for start in range(first + (i % PARTS) * TILE, end, PARTS * TILE):
            position = start + tl.arange(0, TILE).to(tl.int64)
            m = position < end
            number, present = number_at(
                p_kept, kept_row * kept_stride, position, kept_width, kept_extent, kept_page, kept_ring, m
            )
            kept, status = resolve(number, space, present, KEPT)
            judged = present & (status == STATUS_OK)
            read_row = tl.where(position < common, first_row, given_row)
            number, there = number_at(
                p_given, read_row * given_stride, position, given_width, given_extent, given_page, given_ring, m
            )
            if OWN_SLOTS:
                given, status = resolve(number, own, there, GIVEN)
            else:
                given, status = resolve(number, space, there, GIVEN)
            given = tl.where(there, given, -1)
            usable = there & (status == STATUS_OK)
            differs = judged & ((usable == 0) | (given != kept))
            if tl.max(differs.to(tl.int32), 0) > 0:
                kind = tl.full((TILE,), KIND_READ_TABLE, tl.int64)
                report_record(
                    region, kind, differs, -1, given, position, -1, region.p_records + given * 4, usable, kept, name,
                    writer, step * 8 + PHASE_PRE,
                )  # fmt: skip


@triton.jit
def compare_lens(region, p_writers, rows, p_given, p_expected, begins, name, step, TILE: tl.constexpr):
    """Reports the rows whose length at ``p_given`` is not the expected one; with ``begins`` 1 a row's length is the
    distance to the next row's number, with 0 the number itself."""
    for start in range(tl.program_id(0) * TILE, rows, tl.num_programs(0) * TILE):
        row = start + tl.arange(0, TILE)
        m = row < rows
        given = tl.load(p_given + row + begins, mask=m, other=0).to(tl.int64)
        given -= tl.load(p_given + row, mask=m & (begins > 0), other=0).to(tl.int64)
        expected = tl.load(p_expected + row, mask=m, other=-1).to(tl.int64)
        differs = m & (expected >= 0) & (given != expected)
        if tl.max(differs.to(tl.int32), 0) > 0:
            kind = tl.full((TILE,), KIND_READ_LENGTH, tl.int64)
            writer = tl.load(p_writers + row, mask=m, other=-1).to(tl.int64)
            report(
                region, kind, differs, -1, -1, -1, -1, name, -1, expected, given, writer, -1, -1, -1,
                step * 8 + PHASE_PRE,
            )  # fmt: skip


@triton.jit
def number_at(p_entries, row_first, position, width, extent, page, ring, m):
    """`ops.torch.plan.numbers`: the slot number at int64 positions in the row from element ``row_first`` on, and
    whether there is an entry."""
    column = position
    if ring > 0:
        column = position % ring
    element = row_first + column // page
    present = m & (column // page < width) & (element >= 0) & (element < extent)
    entry = tl.load(p_entries + element, mask=present, other=-1).to(tl.int64)
    return tl.where(entry >= 0, entry * page + column % page, entry), present
