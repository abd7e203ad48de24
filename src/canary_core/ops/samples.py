"""`Samples`: device memory for sampled tokens, in the one region whose forwards are compared with them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from canary_core.batch import BatchView
from canary_core.ops.upload import upload
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
    """Sampled tokens, on the way from the sampler to the forward that computes them.

    | tensor | shape                             | written by                | read by                            |
    |--------|-----------------------------------|---------------------------|------------------------------------|
    | ends   | int64 ``[1 + rows]``              | `record`                  | `check` of the next forward        |
    | given  | int64 ``[SAMPLE_TOKENS, rows]``   | `give`, after the sampler | `check`, and emptied there         |
    | table  | int64 ``[writers * tokens]``      | `check`                   | `record`                           |
    | tails  | int64 ``[rows, tokens, words]``   | `check`                   | `record`                           |

    ends: number of rows of the last forward; then each row's sample without a token, as of the position after the last
    new token: 0 for a row without new tokens or without a writer.
    given: column ``r`` belongs to row ``r`` of the last forward; the last entry is the token for the position after the
    last new token, the one before for the last new token's own position, and so on.
    table: see `records`. tails: see `TAIL_WORDS`.

    Every use is on the stream of the forwards or ordered with it, so no two uses overlap. Memory is allocated only for
    a batch with more rows than any before.
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
        """Makes room for the batch's rows; returns whether tensors were replaced. Given tokens are kept, and so are
        outgrown tensors: a captured graph may still use them."""
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
        """Takes the sampled tokens of the last recorded forward: int32 or int64 ``[rows]`` or ``[rows, n]``, see
        `sampling.SampledTokens.give`. One copy on the current stream, one more for each row of ``without``."""
        columns = tokens.shape[0]
        if tokens.dim() == 1 or tokens.shape[1] == 1:
            if self._last.shape[0] != columns or self._last.dim() != tokens.dim():
                last = self.given[-1, :columns]
                self._last = last if tokens.dim() == 1 else last[:, None]
            self._last.copy_(tokens)
        else:
            last = tokens[:, -SAMPLE_TOKENS:].t()
            self.given[SAMPLE_TOKENS - last.shape[0] :, :columns].copy_(last)
        for row in without:
            self.given[-1, row].fill_(NO_SAMPLE)

    def of(self, writers: Sequence[int]) -> Tensor:
        """Entries of `table` that may be of ``writers``, int64 ``[n, SAMPLE_TOKENS]``."""
        return self.table.view(SAMPLE_WRITERS, SAMPLE_TOKENS).index_select(
            0, upload([writer % SAMPLE_WRITERS for writer in writers], self.table.device)
        )

    def forget(self) -> None:
        """Nothing is known of any request any more."""
        self.table.zero_()
        self._empty()

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tensors ever allocated."""
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
