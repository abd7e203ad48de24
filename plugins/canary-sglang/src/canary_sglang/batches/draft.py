"""Draft models of EAGLE and STANDALONE. SGLang runs their steps as several forwards, or as one CUDA graph without any
call of `ModelRunner.forward`.

One iteration of the engine begins with ``L`` tokens in the cache, and one sampled token not yet there. The draft model
writes ``steps - 1`` guesses from position ``L`` on (`DraftBatches.steps`). The target verifies them (`ForwardBatches`).
Then the draft model writes the target's tokens over its guesses (`DraftBatches.extend`). Rejected tokens stay in the
request's slots until the next iteration overwrites them; being beyond the prefix, they are not read by any forward.

A draft pool's slot at position ``p`` holds the token at ``p + 1``, with EAGLE's hidden state at ``p``. Requests with a
common prefix share its slots, also the last one: see `Anchors`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from canary_adapters import UniformLens, slot_table
from canary_core import BatchView
from canary_sglang.batches.forward import Anchors
from canary_sglang.batches.writers import RequestWriters


class DraftBatches:
    """Views of a draft worker's runs for one `ScheduleBatch`. To be made on the stream of its forwards: `steps` and
    `extend` before the worker runs, the others after a verification."""

    def __init__(self, runner: Any, regions: Sequence[str], writers: RequestWriters) -> None:
        self._entries: Tensor = runner.req_to_token_pool.req_to_token
        self._regions = tuple(regions)
        self._writers = writers
        self._uniform = UniformLens()
        self._anchors = Anchors(runner, writers)
        self._tokens = torch.zeros(0, dtype=torch.int64, device=self._entries.device)

    def steps(self, batch: Any, written: int) -> BatchView:
        """The draft steps, with ``written`` guesses for each request, 0 for a tree. `guessed` adds the tokens
        afterwards."""
        rows = batch.seq_lens.shape[0]
        return self._view(batch, self._room(rows * max(written, 1)), written, None)

    def guessed(self, view: BatchView, drafted: Any) -> None:
        """Fills in the tokens of a view of `steps` from the chains in ``drafted``. The first token of a chain was
        sampled before, and the draft model does not read the last one, so neither is in the view."""
        written = view.tokens // view.rows
        chains = drafted.draft_token.view(view.rows, -1)
        view.token_ids.view(view.rows, written).copy_(chains[:, 1 : 1 + written])

    def extend(self, batch: Any, tokens: Tensor) -> BatchView:
        """The target's ``tokens``, verified ones first, written to the slots of the verification."""
        slots = batch.out_cache_loc
        same = slots is not None and slots.shape == tokens.shape
        return self._view(batch, tokens, tokens.shape[0] // batch.seq_lens.shape[0], slots if same else None)

    def padding(self, rows: int) -> Iterator[BatchView]:
        """Steps and an extend of ``rows`` rows without reads and writes, for `Canary.warm_up`."""
        numbers = self._entries.new_zeros(rows, dtype=torch.int64)
        writers = self._entries.new_zeros(rows, dtype=torch.int32)
        for tokens, slots in ((numbers, None), (writers, numbers)):
            table = slot_table(self._entries, numbers, slots)
            tables = dict.fromkeys(self._regions, table)
            yield BatchView(numbers, numbers, tokens, writers, tables, anchors=self._anchors.of(numbers))

    def moved(self, batch: Any, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Source and target slots of SGLang's move of a tree's accepted path: int64 ``[n]`` each, -1 where shorter.
        ``accepted``: the path's places among the batch's ``out_cache_loc``, ``[rows, steps]``, -1 where shorter."""
        places = accepted.view(batch.seq_lens.shape[0], -1).long()
        taken = places >= 0
        source = batch.out_cache_loc[places.clamp(min=0)].long()
        columns = batch.seq_lens.long()[:, None] + taken.long().cumsum(1) - 1
        destination = self._entries[batch.req_pool_indices.long()[:, None], torch.where(taken, columns, 0)].long()
        return torch.where(taken, source, -1).flatten(), torch.where(taken, destination, -1).flatten()

    def accepted(self, batch: Any, roots: Tensor, result: Any, carried: bool) -> BatchView:
        """The accepted path of a tree, after SGLang moved it to the front of each request's slots. Tokens from
        `GenerationBatchResult.accept_lens` on are not valid: see `rejected_slots`. ``carried``: whether the move was
        reported."""
        rows = batch.seq_lens.shape[0]
        tokens = result.next_token_ids.view(rows, -1).roll(1, 1)
        tokens[:, 0] = roots
        view = self._view(batch, tokens.flatten(), tokens.shape[1], None)
        tables = {name: replace(table, carried=carried) for name, table in view.tables.items()}
        return replace(view, tables=tables)

    def branch_slots(self, batch: Any, worker: Any) -> Tensor:
        """Every slot possibly written by the steps of a tree, int ``[n]``, padded with 0. Each branch has pages of its
        own behind the prefix, and a copy of the prefix's last page."""
        page, steps, topk = int(worker.draft_runner.page_size), worker.speculative_num_steps, worker.topk
        begin = batch.seq_lens.long()
        whole = begin - begin % page
        end = whole + topk * ((begin % page + steps + page - 1) // page * page)
        columns = begin[:, None] + torch.arange(topk * (steps + 2 * page), device=begin.device)
        inside = columns < end[:, None].clamp(max=self._entries.shape[1])
        return self._slots(batch, columns, inside)

    def rejected_slots(self, batch: Any, result: Any) -> Tensor:
        """Slots of rejected tokens in `accepted`, int ``[n]``, padded with 0."""
        rows = batch.seq_lens.shape[0]
        offset = torch.arange(result.next_token_ids.shape[0] // rows, device=batch.seq_lens.device)
        columns = batch.seq_lens.long()[:, None] + offset
        return self._slots(batch, columns, offset >= result.accept_lens[:, None])

    def _slots(self, batch: Any, columns: Tensor, inside: Tensor) -> Tensor:
        slots = self._entries[batch.req_pool_indices.long()[:, None], torch.where(inside, columns, 0)]
        return torch.where(inside, slots, 0).flatten()

    def _view(self, batch: Any, tokens: Tensor, written: int, slots: Tensor | None) -> BatchView:
        table = slot_table(self._entries, batch.req_pool_indices, slots)
        names = [request.rid for request in batch.reqs]
        return BatchView(
            prefix_lens=batch.seq_lens,
            new_lens=self._uniform.of(written, batch.seq_lens),
            token_ids=tokens,
            writers=self._writers.ids(names),
            tables=dict.fromkeys(self._regions, table),
            anchors=self._anchors.of(batch.seq_lens, names),
        )

    def _room(self, tokens: int) -> Tensor:
        if tokens > self._tokens.shape[0]:
            self._tokens = self._tokens.new_zeros(1 << (tokens - 1).bit_length())
        return self._tokens[:tokens]
