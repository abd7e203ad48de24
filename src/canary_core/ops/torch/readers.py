"""Readers of one prefix within `check`: the rows that follow others, see `canary_core.ops.readers`."""

import torch
from torch import Tensor

from canary_core.batch import BatchView, SlotTable
from canary_core.ops.readers import MOST_ROWS, SPAN_TILES, SPANS
from canary_core.ops.state import RegionState
from canary_core.ops.torch import plan
from canary_core.records import Cursor


def shared_slots(state: RegionState, batch: BatchView, table: SlotTable, rows: plan.Rows, tile: int) -> Tensor:
    """Number of readable places, in tiles of ``tile``, that a row leaves to another one: int64 ``[]``."""
    tiles = ((rows.prefix + tile - 1) // tile).sum()
    span = tile * (tiles // SPANS).clamp(max=SPAN_TILES)
    fit = not (state.region.attention_window or table.ring_slots) and batch.rows <= MOST_ROWS
    if not fit or span < 2 * tile or state.cursors[Cursor.CHECK_TILES] < tiles:
        return torch.zeros_like(tiles)
    # Spans with a place of the row behind them.
    spans = plan.expand(torch.zeros_like(rows.prefix), (rows.prefix - 1).clamp(min=0) // span)
    number, present = plan.numbers(table, plan.Places(spans.row, (spans.position + 1) * span - 1), rows.group)
    row, order, number = spans.row[present], spans.position[present], number[present]
    first = order * span
    leader = _first_with_equal(row, order, number)
    follows = leader < row
    if batch.anchors is not None:
        follows &= (first > 0) | (batch.anchors[row] == batch.anchors[leader])
    entries = plan.expand(plan.last_token((first - 1).clamp(min=0), rows.group), (first + span) * rows.group)
    ours, there = plan.numbers(table, plan.Places(row[entries.row], entries.position))
    theirs, also = plan.numbers(table, plan.Places(leader[entries.row], entries.position))
    follows[entries.row[(ours != theirs) | ~there | ~also]] = False
    if batch.expected_tokens is not None:
        places = plan.expand(first, first + span)
        column = plan.last_token(places.position, rows.group)
        inside = column < batch.expected_tokens.shape[1]
        owner, column = places.row[inside], column[inside]
        differs = batch.expected_tokens[row[owner], column] != batch.expected_tokens[leader[owner], column]
        follows[owner[differs]] = False
    return follows.sum() * span


def _first_with_equal(row: Tensor, order: Tensor, number: Tensor) -> Tensor:
    """The lowest ``row`` with the same ``order`` and ``number``, for each; all int64 ``[n]``."""
    _, group = torch.stack((order, number)).unique(dim=1, return_inverse=True)
    first = torch.full_like(row, torch.iinfo(torch.int64).max)
    first.scatter_reduce_(0, group, row, "amin")
    return first[group]
