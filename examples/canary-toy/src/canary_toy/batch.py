"""A forward of the engine as a view: which slots it reads and writes."""

import torch
from torch import Tensor

from canary_adapters import block_table
from canary_core import BatchAdapter, BatchView, ReadTable, SlotTable, Writers
from canary_toy.pool import REGION
from canary_toy.toy_engine import PAGE, Batch, ModelRunner


class ToyBatch(BatchAdapter[Batch]):
    """Lengths, tokens and tables are the very tensors that the forward reads. What the tokens should be comes from the
    requests' own lists. So each is checked against the other."""

    def __init__(self, runner: ModelRunner, writers: Writers) -> None:
        self._runner = runner
        self._writers = writers

    def view(self, batch: Batch) -> BatchView:
        """Rows of padding have no tokens, and no writer."""
        device, padding = batch.rows.device, [-1] * (len(batch.rows) - len(batch.requests))
        width = max(len(request.tokens) for request in batch.requests)
        names = [request.name for request in batch.requests]
        # Embeddings have numbers of their own, in the place of tokens.
        contents = self._writers.contents
        own = [contents.over(request.name, torch.tensor(request.tokens)).tolist() for request in batch.requests]
        expected = [tokens + [-1] * (width - len(tokens)) for tokens in own] + [[-1] * width for _ in padding]
        computed, new = [request.computed for request in batch.requests], batch.new_lens.tolist()[: len(names)]
        writers = [self._writers.id(name) for name in names]
        return BatchView(
            prefix_lens=batch.prefix_lens,
            new_lens=batch.new_lens,
            token_ids=contents.given(names, computed, new, batch.token_ids),
            positions=batch.positions,
            writers=torch.tensor(writers + padding, device=device),
            tables={REGION: block_table(self._runner.block_tables, PAGE, batch.rows, batch.slot_mapping)},
            expected_tokens=torch.tensor(expected, device=device),
            anchors=self._writers.anchors(names + [""] * len(padding), device),
        )

    def read_table(self, batch: Batch, view: BatchView) -> ReadTable:
        """The pages that attention is given, beside the engine's block tables."""
        given, kept = SlotTable(batch.pages, page_size=PAGE), view.tables[REGION]
        first, end = torch.zeros_like(view.prefix_lens), view.prefix_lens + view.new_lens
        return ReadTable("pages of ModelRunner", REGION, given, kept, first, end, view.writers)

    def sampled(self, batch: Batch, tokens: Tensor) -> Tensor:
        """Each request's next token, -1 where its prompt goes on."""
        lengths = torch.tensor([len(request.tokens) for request in batch.requests], device=tokens.device)
        computed = (batch.prefix_lens + batch.new_lens)[: len(lengths)]
        return torch.where(computed == lengths, tokens, -1)
