"""A forward of the engine as a view: which slots it reads and writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_adapters import block_table, token_table
from canary_core import BatchAdapter, BatchView, Writers
from canary_mini_infer.pool import REGION


@dataclass(frozen=True)
class Forward:
    """One forward: a prompt's next chunk, or one token of each of several requests.

    requests: `mini_infer.scheduler.Sequence`.
    tokens, positions: integer ``[new tokens]`` on the engine's device, as the model reads them.
    prefix_lens: tokens of each request with KV in the pool; new_lens: those computed now.
    blocks: the blocks that attention reads, or that the chunk is stored in. slots: where each new token is stored.
    """

    requests: Sequence[Any]
    tokens: Tensor
    positions: Tensor
    prefix_lens: Sequence[int]
    new_lens: Sequence[int]
    blocks: Sequence[Sequence[int]]
    slots: Sequence[int]


class MiniBatch(BatchAdapter[Forward]):
    """Tokens, positions, lengths and blocks are the arguments of the model and of the store. What the tokens should be
    comes from the requests' own lists."""

    def __init__(self, page: int, writers: Writers) -> None:
        self._page = page
        self._writers = writers

    def view(self, batch: Forward) -> BatchView:
        """One row a request; there is no padding."""
        device, names = batch.tokens.device, [request.request_id for request in batch.requests]
        own = [torch.tensor(r.prompt_token_ids + r.output_token_ids) for r in batch.requests]
        width = max(1, *(len(blocks) for blocks in batch.blocks))
        entries = torch.tensor([[*blocks, *[-1] * (width - len(blocks))] for blocks in batch.blocks], device=device)
        return BatchView(
            prefix_lens=torch.tensor(batch.prefix_lens, device=device),
            new_lens=torch.tensor(batch.new_lens, device=device),
            token_ids=batch.tokens,
            positions=batch.positions,
            writers=torch.tensor([self._writers.id(name) for name in names], device=device),
            tables={REGION: block_table(entries, self._page, write_slots=torch.tensor(batch.slots, device=device))},
            expected_tokens=token_table(own, max(map(len, own)), device),
            anchors=self._writers.anchors(names, device),
        )
