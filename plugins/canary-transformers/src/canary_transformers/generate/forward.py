"""`ModelCall`: a model's arguments beside the cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

UNKNOWN = -1
"""Token given as an embedding, or before the guard began: never judged."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """Input of a forward: ``rows`` times ``new`` tokens. ``tokens``: the ids, integer ``[rows, new]``, None for
    embeddings. ``history``: the sequences themselves, integer ``[rows, n]``, up to the forward's tokens, for a call by
    `generate()`. ``encoded``: the encoder's states beside, ``[rows, states, hidden]``. ``answering``: `generate()`
    calls, which gives the same states to all forwards of an answer."""

    rows: int
    new: int
    tokens: Tensor | None
    history: Tensor | None
    encoded: Tensor | None = None
    answering: bool = False

    def history_to(self, end: int) -> Tensor | None:
        """The sequences' last tokens up to position ``end``; None where unknown, or longer."""
        history = self.history
        if history is None or history.dim() != 2 or history.shape[0] != self.rows:
            return None
        return history if 0 < history.shape[1] <= end else None

    def token_ids(self, device: torch.device, copied: bool = False) -> Tensor:
        """The tokens, row after row, int64. ``copied``: in memory of their own; the caller may write the next ones to
        its own."""
        if self.tokens is None:
            return torch.full((self.rows * self.new,), UNKNOWN, dtype=torch.int64, device=device)
        # One column of a longer tensor is a list with gaps.
        tokens = self.tokens.to(device, torch.int64).reshape(-1).contiguous()
        return tokens.clone() if copied else tokens

    def expected_tokens(self, prefix: int, unknown: int, device: torch.device) -> Tensor | None:
        """Expected token of every position up to the end, int64 ``[rows, prefix + new]``, if known; never for the first
        ``unknown``."""
        end = prefix + self.new
        history = self.history_to(end)
        if history is None:
            return None
        if history.shape[1] == end and not unknown and self.tokens is not None:
            return history.to(device, torch.int64)
        expected = torch.full((self.rows, end), UNKNOWN, dtype=torch.int64, device=device)
        expected[:, end - history.shape[1] :] = history.to(device)
        expected[:, :unknown] = UNKNOWN
        if self.tokens is None:
            expected[:, prefix:] = UNKNOWN
        return expected
