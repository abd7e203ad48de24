"""`RowLengths`: one length for all rows of a cache, on the device, with a launch only now and then."""

import torch
from torch import Tensor

AHEAD = 128
"""Lengths made at once: decodes need one after the other."""


class RowLengths:
    """Returns int64 ``[rows]`` tensors full of one number, never written to again."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._first = 0
        self._made = torch.empty((0, rows), dtype=torch.int64, device=device)
        self._new: tuple[int, Tensor] | None = None

    def of(self, length: int) -> Tensor:
        """``length`` for each row; cheap for the next ones, too."""
        if not 0 <= length - self._first < len(self._made):
            self._first = length
            lengths = torch.arange(length, length + AHEAD, device=self._device)
            # Each begins at a multiple of 16 bytes: kernels are compiled for that.
            self._made = lengths[:, None].expand(-1, self._rows + self._rows % 2).contiguous()[:, : self._rows]
        return self._made[length - self._first]

    def new(self, count: int) -> Tensor:
        """``count`` for each row; cheap when repeated."""
        if self._new is None or self._new[0] != count:
            self._new = count, torch.full((self._rows,), count, dtype=torch.int64, device=self._device)
        return self._new[1]
