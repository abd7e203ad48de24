"""`Samples`: device memory for what the sampler gave, of the one region whose forwards are compared with it."""

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.records import (
    NO_SAMPLE,
    NOT_SAMPLED,
    SAMPLE_TOKENS,
    SAMPLE_WRITERS,
    TAIL_WORDS,
)

FIRST_ROWS = 256
"""Rows of a batch before a larger one comes."""


class Samples:
    """Sampled tokens, on their way from the sampler to the forward that computes them.

    | tensor | shape                             | written by                | read by                            |
    |--------|-----------------------------------|---------------------------|------------------------------------|
    | ends   | int64 ``[1 + rows]``              | `record`                  | `check` of the next forward        |
    | given  | int64 ``[SAMPLE_TOKENS, rows]``   | `give`, after the sampler | `check`, which empties it          |
    | table  | int64 ``[writers * tokens]``      | `check`                   | `record`                           |
    | tails  | int64 ``[rows, tokens, words]``   | `check`                   | `record`                           |

    ends: how many rows the last forward had; then each row's sample without its token, as of the position after its
    last new token: 0 for a row without new tokens or without a writer. given: column ``r`` is of row ``r`` of that
    forward; the last is the token for the position after its last new token, the one before that for the last new
    token's own position, and so on. table: see `records`. tails: see `TAIL_WORDS`.

    Each is used on the stream of the forwards or ordered with it, so no two of these ever overlap. Nothing is allocated
    but where a batch has more rows than any before.
    """

    def __init__(self, device: torch.device) -> None:
        self.table = torch.zeros(SAMPLE_WRITERS * SAMPLE_TOKENS, dtype=torch.int64, device=device)
        self._outgrown: list[Tensor] = []
        self.rows = 0
        """Most rows of a batch."""
        # The part of the last row of `given` that was written last: decodes have as many rows as the one before.
        self._last = self.table[:0]
        self._allocate(FIRST_ROWS)

    def grow(self, batch: BatchView) -> bool:
        """Makes room for the batch's rows; gives whether tensors were replaced. What was given is kept. Outgrown
        tensors are, too: a captured graph may still use them."""
        rows = self.rows
        if batch.rows <= rows:
            return False
        given, ends = self.given, self.ends
        self._outgrown += [given, ends, self.tails]
        self._allocate(1 << (batch.rows - 1).bit_length())
        self.given[:, :rows] = given
        self.ends[: 1 + rows] = ends
        return True

    def give(self, tokens: Tensor, without: tuple[int, ...] = ()) -> None:
        """What the sampler gave for the forward that was recorded last: int32 or int64 ``[rows]`` or ``[rows, n]``, see
        `sampling.SampledTokens.give`. One copy on the current stream, one more for each row of ``without``."""
        columns = tokens.shape[0]
        if tokens.dim() == 1:
            if self._last.shape[0] != columns:
                self._last = self.given[-1, :columns]
            self._last.copy_(tokens)
        else:
            last = tokens[:, -SAMPLE_TOKENS:].t()
            self.given[SAMPLE_TOKENS - last.shape[0] :, :columns].copy_(last)
        for row in without:
            self.given[-1, row].fill_(NO_SAMPLE)

    def forget(self) -> None:
        """Nothing is known of any request any more."""
        self.table.zero_()
        self._empty()

    @property
    def memory_bytes(self) -> int:
        """Of all that was ever allocated."""
        return sum(t.nbytes for t in (self.table, self.given, self.ends, self.tails, *self._outgrown))

    def _allocate(self, rows: int) -> None:
        table = self.table
        self.rows = rows
        self.given = table.new_full((SAMPLE_TOKENS, rows), NOT_SAMPLED)
        self._last = self.given[-1]
        self.ends = table.new_zeros(1 + rows)
        self.tails = table.new_zeros(rows, SAMPLE_TOKENS, TAIL_WORDS)
        self._empty()

    def _empty(self) -> None:
        self.given.fill_(NOT_SAMPLED)
        self.given[-1].fill_(NO_SAMPLE)
        self.ends.zero_()
