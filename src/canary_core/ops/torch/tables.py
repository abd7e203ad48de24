"""compare_tables: the table and the lengths given to attention, against the engine's own."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from canary_core.ops.mapping import see
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.ops.torch.ring import report
from canary_core.read_table import ReadTable
from canary_core.records import Clock, Kind, Phase, Row, Status


def compare_tables(state: RegionState, table: ReadTable, names: Sequence[int], wait: bool = True) -> bool:
    """Before or after the `check` of a forward, and before its `record`: compares the two tables at each position of
    ``table``, and its lengths row by row. Reports READ_TABLE where the engine's table has a slot and the given one
    names another, or none; READ_LENGTH where a given length is not the expected one. ``names``: the host's numbers for
    `ReadTable.name` and those of its lengths. ``wait``: for compilation. Returns whether the tables were compared;
    always so with ``wait``."""
    step = (state.shared.clock[Clock.STEP] + 1) * 8 + Phase.PRE_FORWARD
    _compare_slots(state, table, names[0], step)
    for lens, name in zip(table.lens, names[1:], strict=True):
        rows, expected = table.rows, lens.expected.long()
        given = lens.given.long()
        given = given[1 : rows + 1] - given[:rows] if lens.begins else given[:rows]
        differs = (given != expected) & (expected >= 0)
        fields: dict[Row, Tensor | int] = {
            Row.REGION: state.index,
            Row.STORED_TOKEN: name,
            Row.STORED_VALUE: expected[differs],
            Row.FOUND_VALUE: given[differs],
            Row.WRITER: table.writers[differs].long(),
            Row.STEP: step,
        }
        report(state.shared, Kind.READ_LENGTH, torch.full_like(given[differs], -1), fields)
    return True


def _compare_slots(state: RegionState, table: ReadTable, name: int, step: Tensor) -> None:
    region = state.region
    first = table.first.long().clamp(min=0)
    places = plan.expand(first, torch.maximum(table.end.long(), first))
    kept, kept_status = plan.lookup(region, table.kept, places)
    read = replace(places, row=torch.where(places.position < table.common, 0, places.row))
    number, present = plan.numbers(table.given, read)
    if table.own_slots:
        given, status = number, region.status_of(number)
    else:
        given, status = region.resolve(number, table.given.pool_page)
    given = torch.where(present, given, -1)
    status = torch.where(present, status, Status.RANGE)
    differs = (kept_status == Status.OK) & ((status != Status.OK) | (given != kept))
    if not bool(differs.any()):
        return
    given, row = given[differs], places.row[differs]
    fields: dict[Row, Tensor | int] = {
        **see(state, given, status[differs]).fields(),
        Row.REGION: state.index,
        Row.POSITION: places.position[differs],
        Row.STORED_VALUE: kept[differs],
        Row.FOUND_VALUE: name,
        Row.WRITER: table.writers[row].long(),
        Row.STEP: step,
    }
    report(state.shared, Kind.READ_TABLE, given, fields)
