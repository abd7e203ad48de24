"""A batch of continuous batching as a `BatchView`: the tables are the very tensors that the forward reads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add, is_
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from canary_adapters import block_table, ragged_table
from canary_core import BatchAdapter, BatchView, SlotTable, Writers
from canary_transformers.continuous.compat import KVGroup
from canary_transformers.continuous.tokens import TokenBook
from canary_transformers.continuous.upload import upload_lists


@dataclass(frozen=True, slots=True, eq=False)
class ContinuousForward:
    """One forward as the engine issues it: its `FutureRequestState`s, and the keyword arguments of the model."""

    requests: Sequence[Any]
    arguments: Mapping[str, Any]


class ContinuousBatch(BatchAdapter[ContinuousForward]):
    """Lengths and tokens come from the requests' own states, tables and inputs from the device: each is checked against
    the other.

    Called after the batch was prepared, which has moved each request's ``position_offset`` behind its new tokens.
    """

    def __init__(self, groups: Sequence[KVGroup], writers: Writers, book: TokenBook) -> None:
        self._groups = tuple(groups)
        self._writers = writers
        self._book = book
        self._states: WeakValueDictionary[str, Any] = WeakValueDictionary()
        # The states of the last batch, and the writers of its rows: a decode has those of the one before.
        self._last: tuple[list[Any], list[int]] = ([], [])

    def view(self, batch: ContinuousForward) -> BatchView | None:
        """The forward's rows are its requests, in order; tokens behind theirs are padding of the engine."""
        states = [request.state for request in batch.requests]
        if not states:
            return None
        new = [request.query_length for request in batch.requests]
        past = [state.position_offset - count for state, count in zip(states, new, strict=True)]
        input_ids: Tensor = batch.arguments["input_ids"][0]
        starts = [self._starts(group, batch.arguments, past, new) for group in self._groups]
        history = self._book.changes(states, max(map(add, past, new)))
        lists = [past, new, self._writer_ids(states), *starts, *history]
        prefix_lens, new_lens, writer_ids, *others = upload_lists(lists, input_ids.device)
        row_starts, changes = others[: len(starts)], others[len(starts) :]
        return BatchView(
            prefix_lens=prefix_lens,
            new_lens=new_lens,
            token_ids=input_ids,
            writers=writer_ids,
            tables={
                group.name: _table(group, batch.arguments, rows)
                for group, rows in zip(self._groups, row_starts, strict=True)
            },
            positions=batch.arguments["position_ids"][0],
            expected_tokens=self._book.take(*changes),
        )

    def _writer_ids(self, states: list[Any]) -> list[int]:
        """Of each row's request."""
        last, writers = self._last
        if len(last) != len(states) or not all(map(is_, last, states)):
            self._notice_reused_names(states)
            writers = [self._writers.id(state.request_id) for state in states]
            self._last = states, writers
        return writers

    def _notice_reused_names(self, states: Sequence[Any]) -> None:
        """A new state under a known name is another request, unless it is what preemption made of the old one."""
        for state in states:
            if self._states.get(state.request_id) is not state:
                self._states[state.request_id] = state
                if not state._true_initial_tokens:
                    self._writers.forget(state.request_id)

    def _starts(
        self, group: KVGroup, arguments: Mapping[str, Any], past: Sequence[int], new: Sequence[int]
    ) -> list[int]:
        """Where each row's position 0 would be in the flat list that `_table` reads; may be negative."""
        if not arguments["read_index"][group.index].numel():
            return _firsts(new)
        window = group.window_tokens
        if window is None:
            return _firsts(map(add, past, new))
        cached = [min(p, window - 1) for p in past]
        firsts = _firsts(map(add, cached, new))
        return [first - (p - c) for first, p, c in zip(firsts, past, cached, strict=True)]


def _firsts(lengths: Iterable[int]) -> list[int]:
    """Where each of these lists begins, one after the other."""
    firsts = list(accumulate(lengths, initial=0))
    firsts.pop()
    return firsts


def _table(group: KVGroup, arguments: Mapping[str, Any], starts: Tensor) -> SlotTable:
    blocks = arguments.get("block_table")
    if blocks is not None:
        return block_table(blocks[group.index], group.block_slots, pool_page=group.pool_page)
    read: Tensor = arguments["read_index"][group.index]
    write: Tensor = arguments["write_index"][group.index]
    # With nothing in the cache to read, the engine leaves the read list out: a row's positions are where it writes.
    table = ragged_table(read if read.numel() else write, starts, write_slots=write, pool_page=group.pool_page)
    # A ring keeps the last tokens of a longer query; the engine sends the others to its trash.
    return table if group.window_tokens is None else replace(table, stored_tokens=group.window_tokens)
