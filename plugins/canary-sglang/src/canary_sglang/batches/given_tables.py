"""`GivenTables`: the lists and lengths given to a model's attention, against `req_to_token` and the forward's own."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from canary_adapters import UniformLens, block_table, ragged_table, ring_table, slot_table, upload
from canary_core import Canary, Patches, ReadLens, ReadTable, RegionKind
from canary_sglang.batches.forward import FIRST_ROWS
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import attention


class GivenTables:
    """Compares the tables made by one runner's attention backends from `req_to_token`, and from the map of requests to
    recurrent states (the region ``states``), right after they are made: while a forward is issued (`around`), on its
    stream. The scheduler may write to both afterwards (`Step.follow_check`). Where a model has both, they take turns.

    The backends' own objects are patched with the first forward, since SGLang makes them after the pool. An unknown
    backend is reported once, as a ``tables_left_out`` event. Of a backend that reads `req_to_token` row by row the
    lengths of the rows' keys are compared, in one layer.
    """

    def __init__(
        self, runner: Any, canary: Canary, regions: Sequence[str], writers: RequestWriters, states: str | None = None
    ) -> None:
        self._runner = runner
        self._canary = canary
        self._tables = canary.step.tables
        every = {name: canary.regions[name] for name in regions}
        kinds = {region.kind: name for name, region in every.items() if region.tokens_per_slot == 1}
        self._full, self._window = kinds.get(RegionKind.FULL), kinds.get(RegionKind.WINDOW)
        self._writers = writers
        self._patches = Patches(canary.guard)
        self._uniform = UniformLens()
        self._buffers: Tensor | None = None
        self._backend: Any = None
        self._batch: Any = None
        self._keys: list[int] = []
        pool = getattr(runner, "req_to_token_pool", None)
        # Of others the numbers are not those of the slots.
        self._states = states if type(pool).__name__ == "HybridReqToTokenPool" else None
        self._follows_slots = self._follows_states = False
        self._turn_of_states = False

    def around(self, forward: Callable[[], Any], batch: Any) -> Any:
        """Issues ``forward``, of ``batch`` with due tables, and returns its result. Without a comparison by then, they
        are skipped: before the step ends, which makes the next ones due."""
        with self._canary.guard("tables"):
            if self._runner.attn_backend is not self._backend:
                self._follow(self._runner.attn_backend)
            self._batch = batch if self._patches.done else None
            self._keys.clear()
            self._turn_of_states = self._follows_states and not (self._follows_slots and self._turn_of_states)
        try:
            return forward()
        finally:
            if self._batch is not None and self._tables.due:
                self._tables.skip()
            self._batch = None

    def close(self) -> None:
        """Restores the backends' methods."""
        self._patches.undo()

    def _follow(self, backend: Any) -> None:
        self._patches.undo()
        self._backend = backend
        self._follows_slots = self._follows_states = False
        eager, graph = attention.METADATA
        recurrent = None if self._states is None else attention.recurrent(backend)
        if recurrent is not None:
            self._follows_states = True
            self._patches.follow(recurrent, eager, partial(self._made_states, recurrent))
        for leaf in attention.leaves(backend):
            reason = attention.why_not(leaf)
            if reason is not None:
                self._tables.leave_out(type(leaf).__name__, reason)
                self._follow_rows(leaf)
                continue
            self._follows_slots = True
            self._patches.follow(leaf, eager, partial(self._made, leaf, False))
            self._patches.follow(leaf, graph, partial(self._made, leaf, True))

    def _follow_rows(self, leaf: Any) -> None:
        kind = type(leaf).__name__
        name, module = attention.READ_BY_ROW.get(kind), sys.modules[type(leaf).__module__]
        if name is None or not hasattr(module, name):
            self._tables.leave_out(f"lengths of {kind}", "they are not known here")
        elif not self._follows_slots and self._full is not None:
            self._follows_slots = True
            self._patches.wrap(module, name, partial(self._attends, kind))

    def _attends(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original`` is called for each row of each layer, with its keys ``[1, heads, tokens, dim]``."""

        @wraps(original)
        def attend(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            batch = self._batch
            if batch is not None and not self._turn_of_states and self._tables.due and not _capturing():
                with self._canary.guard("tables"):
                    self._read_row(kind, batch, key)
            return original(query, key, *args, **kwargs)

        return attend

    def _read_row(self, kind: str, batch: Any, key: Tensor) -> None:
        self._keys.append(key.shape[-2])
        end, new, rows = attention.read_lengths(batch), attention.new_lengths(batch), len(batch.rids)
        if len(self._keys) < rows or self._full is None:
            return
        given, self._keys = self._keys, []
        if end is None or new is None:
            self._tables.skip()
            return
        whole = end[:rows] if batch.forward_mode.name == "DECODE" else end[:rows] + new
        lens = ReadLens(f"keys of {kind}", upload(given, end.device), whole)
        table = slot_table(self._runner.req_to_token_pool.req_to_token, batch.req_pool_indices[:rows])
        self._tables.compare([ReadTable.of_lens(self._full, table, self._writers.ids(batch.rids), lens)])

    def _made(self, backend: Any, graph: bool, _: Any, *args: Any, **kwargs: Any) -> None:
        batch = self._batch
        if batch is None or self._turn_of_states or not self._tables.due or kwargs.get("in_capture") or _capturing():
            return
        with self._canary.guard("tables"):
            seen = args[0] if args else kwargs["forward_batch"]
            self._tables.compare(list(self._read_tables(backend, graph, batch, seen)))

    def _made_states(self, backend: Any, *args: Any, **kwargs: Any) -> None:
        batch = self._batch
        if batch is None or not self._turn_of_states or not self._tables.due or _capturing():
            return
        with self._canary.guard("tables"):
            self._tables.compare(list(self._state_tables(backend, batch)))

    def _state_tables(self, backend: Any, batch: Any) -> Iterator[ReadTable]:
        """Tables of states. A request's state counts as read by its last position before the forward."""
        made, lengths, rows = attention.state_slots(backend, batch), attention.read_lengths(batch), len(batch.rids)
        if made is None or lengths is None or self._states is None or len(made) < rows:
            return
        slots = self._runner.req_to_token_pool.req_index_to_mamba_index_mapping
        kept = ring_table(slot_table(slots[:, None], batch.req_pool_indices[:rows]), 1)
        given = ring_table(slot_table(made[:rows, None]), 1)
        end = lengths[:rows].clamp(min=1)
        name = f"mamba_cache_indices of {type(backend).__name__}"
        yield ReadTable(name, self._states, given, kept, end - 1, end, self._writers.ids(batch.rids))

    def _read_tables(self, backend: Any, graph: bool, batch: Any, seen: Any) -> Iterator[ReadTable]:
        """Tables of slots. ``seen``: the batch as given to the backend, with padded rows in a graph."""
        lengths, rows = attention.read_lengths(batch), len(batch.rids)
        if lengths is None:
            return
        end = lengths[:rows]
        kept = slot_table(self._runner.req_to_token_pool.req_to_token, batch.req_pool_indices[:rows])
        for made in attention.made(backend, graph, seen):
            region = self._window if made.own_slots else self._full
            if region is None or made.rows < rows:
                continue
            tokens = made.window_tokens
            first = self._uniform.of(0, end) if tokens is None else self._window_first(end, tokens)
            if isinstance(made, attention.Pages):
                given = block_table(made.entries[:rows], made.page_size)
            else:
                given = ragged_table(made.entries, self._list_begins(made, first, rows))
            writers = self._writers.ids(batch.rids)
            lens = tuple(self._lens(made, batch, first, end))
            yield ReadTable(made.name, region, given, kept, first, end, writers, made.own_slots, lens=lens)

    def _lens(self, made: attention.Made, batch: Any, first: Tensor, end: Tensor) -> Iterator[ReadLens]:
        new = attention.new_lengths(batch)
        if new is None or not made.lens:
            self._tables.leave_out(f"lengths of {made.name}", "they are not known in every forward")
            return
        new = self._uniform.of(new, end) if isinstance(new, int) else new[: len(end)]
        # A decode's positions are all read from the pool, its own among them.
        later = 0 if batch.forward_mode.name == "DECODE" else new
        read = end if made.window_tokens is None else end - first
        for lens in made.lens:
            expected = {"read": read, "rest": read + later, "whole": end + later, "new": new}[lens.of]
            yield ReadLens(lens.name, lens.given, expected, lens.begins)

    def _window_first(self, end: Tensor, tokens: int) -> Tensor:
        """The first of the last ``tokens`` positions of each row, in a static buffer."""
        if self._buffers is None or self._buffers.shape[1] < len(end):
            self._buffers = torch.zeros((2, max(len(end), FIRST_ROWS)), dtype=torch.int64, device=end.device)
        return torch.sub(end, tokens, out=self._buffers[0, : len(end)]).clamp_(min=0)

    def _list_begins(self, made: attention.Indices, first: Tensor, rows: int) -> Tensor:
        """Place of each row's position 0 in a list that begins with its position ``first``; for a window's list, in a
        static buffer."""
        starts = made.starts[:rows]
        if made.window_tokens is None or self._buffers is None:
            return starts
        return torch.sub(starts, first, out=self._buffers[1, :rows])


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
