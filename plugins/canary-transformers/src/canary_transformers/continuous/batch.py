"""A batch of continuous batching as a `BatchView`: the tables are the very tensors read by the forward."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add, is_
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from canary_adapters import block_table
from canary_core import BatchAdapter, BatchView, SlotTable, Writers
from canary_transformers.continuous.compat import KVGroup
from canary_transformers.continuous.decodes import Decodes
from canary_transformers.continuous.tokens import TokenBook
from canary_transformers.continuous.upload import upload_lists


@dataclass(frozen=True, slots=True, eq=False)
class ContinuousForward:
    """One forward as issued by the engine: its `FutureRequestState` objects, and the keyword arguments of the model."""

    requests: Sequence[Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """On the device, for each row: tokens in the cache, new tokens, writer, and the place of position 0 in each group's
    list; and anchor."""

    prefix_lens: Tensor
    new_lens: Tensor
    writers: Tensor
    starts: Sequence[Tensor]
    anchors: Tensor


class ContinuousBatch(BatchAdapter[ContinuousForward]):
    """Lengths and tokens come from the requests' own states, tables and inputs from the device: each is checked against
    the other.

    Called after the batch was prepared, with each request's ``position_offset`` already behind its new tokens. Decodes
    of the same requests have one view with changing numbers: so each view is made in stream order with the readers of
    the one before.
    """

    def __init__(self, groups: Sequence[KVGroup], writers: Writers, device: torch.device, book: TokenBook) -> None:
        self._groups = tuple(groups)
        self._writers = writers
        self._device = device
        self._book = book
        self._states: WeakValueDictionary[str, Any] = WeakValueDictionary()
        # The states of the last batch, and the writers of its rows: a decode has those of the one before.
        self._last: tuple[list[Any], list[int]] = ([], [])
        # What goes on where the last batch was a decode, and its rows.
        self._decodes: Decodes | None = None
        self._rows: _Rows | None = None
        # With which weights the originals of forks began.
        self._forked: dict[str, int] = {}
        self.begins: Callable[[], None] = lambda: None
        """Called before the first forward of a request, or of one that was preempted."""

    def view(self, batch: ContinuousForward) -> BatchView | None:
        """The forward's rows are its requests, in order; later tokens are padding of the engine."""
        requests, arguments = batch.requests, batch.arguments
        states = [request.state for request in requests]
        if not states:
            return None
        new = [request.query_length for request in requests]
        decodes, rows = self._decodes, self._rows
        if decodes is not None and rows is not None and decodes.follows(states, new, arguments):
            tokens = self._book.decoded(states, decodes.end)
            if tokens is not None:
                return self._next(decodes, rows, tokens, arguments)
        return self._first(states, new, arguments)

    def _next(self, decodes: Decodes, rows: _Rows, tokens: list[int], arguments: Mapping[str, Any]) -> BatchView:
        """The view of the next decode."""
        decodes.go_on(tokens)
        self._book.write(decodes.places, decodes.tokens)
        key, places = arguments["input_ids"].data_ptr(), decodes.of_engine(arguments)
        known = decodes.views.get(key)
        if known is None or known[0] != places:
            rows = replace(rows, prefix_lens=decodes.prefix_lens, starts=decodes.starts)
            known = decodes.views[key] = places, self._make(rows, arguments, longer=True)
        return known[1]

    def _first(self, states: list[Any], new: list[int], arguments: Mapping[str, Any]) -> BatchView:
        """The view of a batch unlike the one before."""
        past = [state.position_offset - count for state, count in zip(states, new, strict=True)]
        firsts = [self._starts(group, arguments, past, new) for group in self._groups]
        history = self._book.changes(states, max(map(add, past, new)))
        lists = [past, new, self._writer_ids(states), *firsts, *history]
        prefix_lens, new_lens, writers, *others = upload_lists(lists, self._device)
        starts, changes = others[: len(firsts)], others[len(firsts) :]
        self._book.apply(*changes)
        anchors = self._writers.anchors([state.request_id for state in states], self._device)
        rows = _Rows(prefix_lens, new_lens, writers, starts, anchors)
        self._decodes, self._rows = None, rows
        if max(new) == 1:
            self._decodes = Decodes(self._groups, arguments, past, firsts, self._book.places)
        return self._make(rows, arguments, longer=False)

    def _make(self, rows: _Rows, arguments: Mapping[str, Any], longer: bool) -> BatchView:
        """``longer``: the engine's lists may get longer while the view is in use."""
        return BatchView(
            prefix_lens=rows.prefix_lens,
            new_lens=rows.new_lens,
            token_ids=arguments["input_ids"][0],
            writers=rows.writers,
            tables={
                group.name: _table(group, arguments, starts, longer)
                for group, starts in zip(self._groups, rows.starts, strict=True)
            },
            positions=arguments["position_ids"][0],
            expected_tokens=self._book.tokens,
            anchors=rows.anchors,
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
        """A new state under a known name is another request, unless made from the old one by preemption."""
        fresh = [state for state in states if self._states.get(state.request_id) is not state]
        if fresh:
            self.begins()
        for state in fresh:
            name = state.request_id
            self._states[name] = state
            if state._true_initial_tokens:
                self._writers.again(name)
                continue
            self._writers.forget(name)
            if name in self._forked:
                self._writers.identify(name)
                self._writers.go_on(name, self._forked.pop(name))

    def forked(self, original: Any, names: Iterable[str]) -> None:
        """Requests of these ``names`` begin with all that the state ``original`` has cached."""
        began = self._writers.began(original.request_id)
        self._forked.update(dict.fromkeys(names, began))

    def _starts(
        self, group: KVGroup, arguments: Mapping[str, Any], past: Sequence[int], new: Sequence[int]
    ) -> list[int]:
        """Place of each row's position 0 in the flat list read by `_table`; may be negative."""
        if not arguments["read_index"][group.index].numel():
            return _firsts(new)
        window = group.window_tokens
        if window is None:
            return _firsts(map(add, past, new))
        cached = [min(p, window - 1) for p in past]
        firsts = _firsts(map(add, cached, new))
        return [first - (p - c) for first, p, c in zip(firsts, past, cached, strict=True)]


def _firsts(lengths: Iterable[int]) -> list[int]:
    """Start of each of these lengths, one after the other."""
    firsts = list(accumulate(lengths, initial=0))
    firsts.pop()
    return firsts


def _table(group: KVGroup, arguments: Mapping[str, Any], starts: Tensor, longer: bool) -> SlotTable:
    blocks = arguments.get("block_table")
    if blocks is not None:
        return block_table(blocks[group.index], group.block_slots, pool_page=group.pool_page)
    read: Tensor = arguments["read_index"][group.index]
    write: Tensor = arguments["write_index"][group.index]
    # With nothing in the cache to read, the engine leaves the read list out: a row's positions are where it writes.
    listed = read if read.numel() else write
    # A list gets longer in the same memory.
    length = _room(listed) if longer else listed.shape[0]
    return SlotTable(
        listed.as_strided((1, length), (1, 1)),
        starts,
        write_slots=write,
        # A ring keeps the last tokens of a longer query; the engine sends the others to its trash.
        stored_tokens=group.window_tokens or 0,
        pool_page=group.pool_page,
    )


def _room(listed: Tensor) -> int:
    """Number of elements from the first one of ``listed`` to the end of the memory."""
    return int(listed.untyped_storage().nbytes() // listed.element_size() - listed.storage_offset())
