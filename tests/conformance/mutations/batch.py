"""Wrong views of a forward, those that copy themselves among them."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from canary_toy.batch import ToyBatch
from canary_toy.pool import REGION
from canary_toy.toy_engine import PAGE, ModelRunner
from conformance.mutations.changes import (
    Break,
    entries,
    fills_padding,
    late_tables,
    padding_is_live,
    stale_tables,
    tables,
    view,
    view_fields,
    write_slots,
)

from canary_core import BatchView, SlotTable


def own_tokens(view: BatchView, batch: Any) -> BatchView:
    """Expected tokens are those that the batch computes, wherever it computes any."""
    expected = view.expected_tokens.clone()
    first = 0
    for row, (prefix, new) in enumerate(zip(view.prefix_lens.tolist(), view.new_lens.tolist(), strict=True)):
        there = min(new, max(expected.shape[1] - prefix, 0))
        expected[row, prefix : prefix + there] = view.token_ids[first : first + there]
        first += new
    return dataclasses.replace(view, expected_tokens=expected)


def only_own_tokens(view: BatchView, batch: Any) -> BatchView:
    """The same, and nothing is known of the rest."""
    nothing = dataclasses.replace(view, expected_tokens=torch.full_like(view.expected_tokens, -1))
    return own_tokens(nothing, batch)


def derived_positions(view: BatchView, batch: Any) -> BatchView:
    """Positions are counted from the lengths."""
    counted = [
        prefix + i
        for prefix, new in zip(view.prefix_lens.tolist(), view.new_lens.tolist(), strict=True)
        for i in range(new)
    ]
    counted += [0] * (view.tokens - len(counted))
    return dataclasses.replace(view, positions=torch.tensor(counted))


def host_tables(view: BatchView, batch: Any) -> BatchView:
    """The table is made from the requests' own lists of pages."""
    table = view.tables[REGION]
    entries = table.entries.clone()
    for request in batch.requests:
        entries[request.row, : len(request.pages)] = torch.tensor(request.pages, dtype=entries.dtype)
    return dataclasses.replace(view, tables={REGION: replace(table, entries=entries)})


def host_lengths(view: BatchView, batch: Any) -> BatchView:
    """Lengths are the requests' own counts."""
    computed = [request.computed for request in batch.requests]
    padding = [0] * (view.rows - len(computed))
    return dataclasses.replace(view, prefix_lens=torch.tensor(computed + padding))


def derived_writes(view: BatchView, batch: Any) -> BatchView:
    """Write slots are found through the table."""
    table = view.tables[REGION]
    slots = torch.zeros_like(table.write_slots)
    first = 0
    for row, (prefix, new) in enumerate(zip(view.prefix_lens.tolist(), view.new_lens.tolist(), strict=True)):
        for i in range(new):
            at = prefix + i
            page = table.entries[table.rows[row], min(at // PAGE, table.entries.shape[1] - 1)]
            slots[first + i] = page * PAGE + at % PAGE
        first += new
    return dataclasses.replace(view, tables={REGION: replace(table, write_slots=slots)})


def own_tokens_only(view: BatchView, batch: Any) -> BatchView:
    """The view has tokens where requests have embeddings."""
    expected = view.expected_tokens.clone()
    for row, request in enumerate(batch.requests):
        expected[row, : len(request.tokens)] = torch.tensor(request.tokens)
    return dataclasses.replace(view, token_ids=batch.token_ids, expected_tokens=expected)


def without_writes(decodes: bool) -> Break:
    """No write slots, in decodes or in all others."""

    def change(view: BatchView, batch: Any) -> BatchView:
        table = view.tables[REGION]
        left_out = (int(view.new_lens.max()) == 1) is decodes
        return dataclasses.replace(view, tables={REGION: replace(table, write_slots=None)}) if left_out else view

    return view(change)


def before_loading(patch: pytest.MonkeyPatch) -> None:
    """The view is of the batch that is copied to the buffers, not of the buffers."""
    right, given = ModelRunner.load, {}

    def load(self: ModelRunner, batch: Any) -> Any:
        loaded = right(self, batch)
        given[loaded.token_ids.data_ptr()] = batch
        return loaded

    patch.setattr(ModelRunner, "load", load)
    made = ToyBatch.view
    patch.setattr(ToyBatch, "view", lambda self, batch: made(self, given[batch.token_ids.data_ptr()]))


def shifted_without_writes(change: Any) -> Break:
    """The table's entries changed, and no write slots."""
    return tables(lambda table: replace(table, entries=change(table.entries), write_slots=None))


def read_tables(change: Any) -> Break:
    """The table of attention, as it is told."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        right = ToyBatch.read_table
        patch.setattr(ToyBatch, "read_table", lambda self, batch, view: change(right(self, batch, view)))

    return apply


BATCH: dict[str, Break] = {
    "the view is always None": view(lambda view, _: None),
    "the view is None for decodes": view(lambda view, _: None if int(view.new_lens.max()) == 1 else view),
    "the view is None for prefills": view(lambda view, _: view if int(view.new_lens.max()) == 1 else None),
    "the view has no tables": view_fields(tables=lambda tables: {}),
    "prefix lengths are one too long": view_fields(prefix_lens=lambda t: t + (t > 0)),
    "prefix lengths are one too short": view_fields(prefix_lens=lambda t: (t - 1).clamp(min=0)),
    "prefix lengths are 0": view_fields(prefix_lens=torch.zeros_like),
    "prefix lengths are the whole lengths": view(
        lambda view, _: dataclasses.replace(view, prefix_lens=view.prefix_lens + view.new_lens)
    ),
    "new lengths are at most 1": view_fields(new_lens=lambda t: t.clamp(max=1)),
    "new lengths are one too short": view_fields(new_lens=lambda t: (t - 1).clamp(min=0)),
    "rows of padding count as requests": view(padding_is_live),
    "the table is one page further": entries(lambda t: t + 1),
    "the table is one page less": entries(lambda t: (t - 1).clamp(min=0)),
    "the table is shifted by one entry": entries(lambda t: t.roll(1, 1)),
    "the table is a copy from the start": stale_tables,
    "the table is that of the forward before": late_tables,
    "the table's rows are taken in order": tables(lambda t: replace(t, rows=None)),
    "the table's page size is half of what it is": tables(lambda t: replace(t, page_size=PAGE // 2)),
    "the table's page size is twice what it is": tables(lambda t: replace(t, page_size=PAGE * 2)),
    "the table counts in slots": tables(lambda t: replace(t, page_size=1)),
    "there are no write slots": write_slots(lambda t: None),
    "write slots are one further": write_slots(lambda t: t + 1),
    "write slots are in reverse order": write_slots(lambda t: t.flip(0)),
    "write slots are numbers of pages": write_slots(lambda t: t // PAGE),
    "write slots are too few": write_slots(lambda t: t[:1]),
    "there are no expected tokens": view_fields(expected_tokens=lambda t: None),
    "expected tokens are shifted by one": view_fields(expected_tokens=lambda t: t.roll(1, 1)),
    "expected tokens are unknown": view_fields(expected_tokens=lambda t: torch.full_like(t, -1)),
    "expected tokens are in reverse order of rows": view_fields(expected_tokens=lambda t: t.flip(0)),
    "token ids are shifted by one": view_fields(token_ids=lambda t: t.roll(1, 0)),
    "positions are one further": view_fields(positions=lambda t: t + 1),
    "writers are unknown": view_fields(writers=lambda t: torch.full_like(t, -1)),
    "all requests are one writer": view_fields(writers=torch.zeros_like),
    "writers are numbers of rows": view_fields(writers=lambda t: torch.arange(len(t))),
    "writers are in reverse order": view_fields(writers=lambda t: t.flip(0)),
    "the adapter writes to the engine's batch": view(fills_padding),
    "expected tokens are the batch's own": view(only_own_tokens),
    "expected tokens are the batch's own where it computes any": view(own_tokens),
    "there are no positions": view_fields(positions=lambda t: None),
    "positions are made from the lengths": view(derived_positions),
    "tables are made from lists on the host": view(host_tables),
    "prefix lengths are made from lists on the host": view(host_lengths),
    "anchors are all 0": view(lambda v, _: dataclasses.replace(v, anchors=torch.zeros(v.rows, dtype=torch.int64))),
    "there are no anchors": view_fields(anchors=lambda t: None),
    "anchors are in reverse order": view_fields(anchors=lambda t: None if t is None else t.flip(0).contiguous()),
    "embeddings are tokens in the view": view(own_tokens_only),
    "embeddings are tokens among the forward's": view(lambda v, b: dataclasses.replace(v, token_ids=b.token_ids)),
    "the view is of what goes into a graph": before_loading,
    "there are no write slots in prefills": without_writes(decodes=False),
    "there are no write slots in decodes": without_writes(decodes=True),
    "write slots are made from the table": view(derived_writes),
    "the table is one page further, without write slots": shifted_without_writes(lambda t: t + 1),
    "the table is shifted by one entry, without write slots": shifted_without_writes(lambda t: t.roll(1, 1)),
    "the table's rows are reversed, without write slots": shifted_without_writes(lambda t: t.flip(0).contiguous()),
    "attention's table is compared with itself": read_tables(lambda t: replace(t, given=t.kept)),
    "attention's table is compared the other way round": read_tables(lambda t: replace(t, kept=t.given)),
    "attention's table is compared with other rows": read_tables(
        lambda t: replace(t, given=SlotTable(t.given.entries.flip(0), page_size=PAGE))
    ),
    "nothing of attention's table is compared": read_tables(lambda t: replace(t, end=t.first)),
    "attention's table counts in slots": read_tables(lambda t: replace(t, given=SlotTable(t.given.entries))),
}
"""By name, in the order of the table in the docs."""
