"""compare_tables: the table given to attention, against the engine's own table."""

import torch
from torch import Tensor

from canary_core.batch import ReadTable
from canary_core.ops.mapping import see
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.ops.torch.ring import report
from canary_core.records import Clock, Kind, Phase, Row, Status


def compare_tables(state: RegionState, table: ReadTable, name: int, wait: bool = True) -> bool:
    """Before or after the `check` of a forward, and before its `record`: compares the two tables at each position of
    ``table``. Reports READ_TABLE where the engine's table has a slot and the given one names another, or none.
    ``name``: the host's number for `ReadTable.name`. ``wait``: for compilation. Returns whether the tables were
    compared; always so with ``wait``."""
    region = state.region
    first = table.first.long().clamp(min=0)
    places = plan.expand(first, torch.maximum(table.end.long(), first))
    kept, kept_status = plan.lookup(region, table.kept, places)
    number, present = plan.numbers(table.given, places)
    if table.own_slots:
        given, status = number, region.status_of(number)
    else:
        given, status = region.resolve(number, table.given.pool_page)
    given = torch.where(present, given, -1)
    status = torch.where(present, status, Status.RANGE)
    differs = (kept_status == Status.OK) & ((status != Status.OK) | (given != kept))
    if not bool(differs.any()):
        return True
    given, row = given[differs], places.row[differs]
    step = (state.shared.clock[Clock.STEP] + 1) * 8 + Phase.PRE_FORWARD
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
    return True
