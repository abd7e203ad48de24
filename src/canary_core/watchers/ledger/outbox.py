"""`Outbox`: block rows on their way from the device to the host, in the order gathered."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from canary_core.runtime.host_copy import HostCopy

About = TypeVar("About")

SLAB_ROWS = 1024
"""Rows copied together."""


@dataclass(slots=True, eq=False)
class _Slab(Generic[About]):
    rows: Tensor
    copy: HostCopy
    used: int = 0
    batches: list[tuple[int, int, About]] = field(default_factory=list)


class Outbox(Generic[About]):
    """Rows are written to slabs of device memory; a full slab, or on `send` a part, is copied to pinned memory. Slabs
    are used again after the read, so that nothing is allocated as long as the host reads as fast as the device writes.
    On a CPU nothing is copied."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._words = words
        self._device = device
        self._filling: _Slab[About] | None = None
        self._sent: deque[_Slab[About]] = deque()
        self._free: list[_Slab[About]] = []

    def write(self, count: int, gather: Callable[[Tensor, int, int, int], None], about: Callable[[int], About]) -> None:
        """Room for ``count`` rows, in the order of the current stream: ``gather(rows, first, begin, end)`` writes rows
        ``begin`` to ``end`` to ``rows``, int64 ``[any, words]``, from row ``first`` on; ``about(begin)`` accompanies
        them."""
        begin = 0
        while begin < count:
            slab = self._filling or self._take()
            self._filling = slab
            end = min(count, begin + SLAB_ROWS - slab.used)
            gather(slab.rows, slab.used, begin, end)
            slab.batches.append((slab.used, slab.used + end - begin, about(begin)))
            slab.used += end - begin
            begin = end
            if slab.used == SLAB_ROWS:
                self.send()

    def send(self) -> None:
        """Starts the copy of the written rows, on the current stream, after the writes. Never waits."""
        slab, self._filling = self._filling, None
        if slab is None:
            return
        slab.copy.start(slab.rows[: slab.used])
        self._sent.append(slab)

    def arrived(self, wait: bool = False) -> list[tuple[Tensor, About]]:
        """Rows arrived on the host since the last call, in order: rows, owned by the caller, and their ``about``.
        ``wait``: for all rows sent."""
        found = []
        while self._sent:
            slab = self._sent[0]
            if wait:
                slab.copy.wait()
            elif not slab.copy.arrived():
                break
            rows = slab.copy.tensors[0]
            found += [(rows[first:end].clone(), about) for first, end, about in slab.batches]
            slab.used, slab.batches = 0, []
            self._free.append(self._sent.popleft())
        return found

    def _take(self) -> _Slab[About]:
        if self._free:
            return self._free.pop()
        # Else they could be written to only in inference mode, if that is where they are made.
        with torch.inference_mode(False):
            rows = torch.empty(SLAB_ROWS, self._words, dtype=torch.int64, device=self._device)
            # Nobody reads this first copy: the next one to the same memory follows it on the device.
            return _Slab(rows, HostCopy(rows))
