"""Lengths of a forward's rows, from attention's own tensors. The host waits for nothing."""

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_ROWS = 256
"""Rows of static tensors at first. A larger batch enlarges them."""


class UniformLens:
    """Static tensors with one number in all rows. After the engine's largest batch, no launch is needed."""

    def __init__(self) -> None:
        self._filled: dict[tuple[int, torch.dtype], Tensor] = {}
        self._last: dict[tuple[int, torch.dtype], Tensor] = {}

    def of(self, value: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``value`` for each row of ``like``, ``[rows]``, with its dtype unless ``dtype`` is given. Must not be written
        to."""
        key, rows = (value, dtype or like.dtype), like.shape[0]
        last = self._last.get(key)
        if last is not None and last.shape[0] == rows:
            return last
        known = self._filled.get(key)
        if known is None or known.shape[0] < rows:
            known = torch.full((max(rows, FIRST_ROWS),), value, dtype=key[1], device=like.device)
            self._filled[key] = known
        found = self._last[key] = known[:rows]
        return found


class FirstRows:
    """The first elements of tensors that an engine keeps. The view of the last call is given again as long as tensor
    and number are the same, as in decode: an engine that takes another tensor gets a view of that one."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Tensor, int, Tensor]] = {}

    def of(self, name: str, tensor: Tensor, number: int) -> Tensor:
        """``tensor[:number]``. ``name``: of the engine's tensor, one view is kept for each."""
        last = self._last.get(name)
        if last is not None and last[0] is tensor and last[1] == number:
            return last[2]
        found = tensor[:number]
        self._last[name] = tensor, number, found
        return found


class PrefixLens:
    """Prefix and new lengths, for engines with the lengths of whole rows and the starts of their new tokens."""

    def __init__(self) -> None:
        self._uniform = UniformLens()

    def of(self, seq_lens: Tensor, starts: Tensor, new: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Both ``[rows]``, with the dtype of ``seq_lens``; must not be written to. ``seq_lens``: ``[rows]``, with the
        new tokens. ``starts``: ``[rows + 1]``, of the same dtype. ``new``: the host's idea of new tokens, by which a
        decode costs one launch instead of two."""
        new_lens = starts[1:] - starts[:-1] if max(new) > 1 else self._uniform.of(1, seq_lens)
        return seq_lens - new_lens, new_lens
