"""`Staging`: a few lists of numbers for each decode, in one copy from memory that is used again."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class _Page:
    """Pinned memory, as a tensor and for the host, with the event of the device's last read; on a CPU plain memory."""

    tensor: Tensor
    numbers: memoryview
    read: torch.cuda.Event | None


class Staging:
    """``lists`` lists of ``length`` integers for each forward. Each `send` replaces the numbers of the one before, in
    the order of the callers' streams.

    tensors: int64 ``[length]`` each, on ``device``, each at a multiple of 16 bytes.
    """

    def __init__(self, lists: int, length: int, device: torch.device) -> None:
        self._shape = lists, length + length % 2
        self._gap = [0] * (length % 2)
        self._device = device
        self._pages: deque[_Page] = deque()
        self._both = torch.zeros(self._shape, dtype=torch.int64, device=device)
        self.tensors = [row[:length] for row in self._both]

    def send(self, lists: Sequence[Sequence[int]]) -> None:
        """One copy on the current stream. The host does not wait."""
        numbers: list[int] = []
        for one in lists:
            numbers += one
            numbers += self._gap
        page = self._page()
        page.numbers[:] = memoryview(array("q", numbers))
        self._both.copy_(page.tensor, non_blocking=True)
        if page.read is not None:
            page.read.record()
        self._pages.append(page)

    def _page(self) -> _Page:
        """A page without a pending read."""
        if self._pages and (self._pages[0].read is None or self._pages[0].read.query()):
            return self._pages.popleft()
        on_gpu = self._device.type == "cuda"
        tensor = torch.empty(self._shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        numbers = memoryview(tensor.numpy().data).cast("B").cast("q")
        return _Page(tensor, numbers, torch.cuda.Event() if on_gpu else None)
