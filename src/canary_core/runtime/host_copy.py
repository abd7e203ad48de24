"""`HostCopy`: tensors on their way from the device to the host, without a wait."""

import torch
from torch import Tensor

from canary_core.runtime.streams import current


class HostCopy:
    """Copies of ``tensors``, as of the current stream's present place.

    On a GPU the copies go to pinned memory, and the originals are kept until read; no other stream may write to them
    meanwhile. On a CPU nothing is copied: the tensors themselves are used. Never captured.

    tensors: the copies, in order; valid once they have `arrived`.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tuple(torch.empty_like(t, device="cpu", pin_memory=True) if t.is_cuda else t for t in tensors)
        self._ready = torch.cuda.Event() if any(t.is_cuda for t in tensors) else None
        self._sources: tuple[Tensor, ...] = ()
        self.start(*tensors)

    def start(self, *tensors: Tensor) -> None:
        """Copies ``tensors``, of the same form as the constructor's, or their first rows, to the same memory on the
        host. Earlier copies must have arrived and been read."""
        if self._ready is None:
            return
        self._sources = tensors
        for host, tensor in zip(self.tensors, tensors, strict=True):
            if host is not tensor:
                whole = host.shape == tensor.shape
                (host if whole else host[: len(tensor)]).copy_(tensor, non_blocking=True)
        self._ready.record(current(next(tensor.device for tensor in tensors if tensor.is_cuda)))

    def arrived(self) -> bool:
        """Whether ``tensors`` may be read. Never waits."""
        if self._sources and self._ready is not None and self._ready.query():
            self._sources = ()
        return not self._sources

    def wait(self) -> None:
        """Waits until ``tensors`` may be read."""
        if self._sources and self._ready is not None:
            self._ready.synchronize()
            self._sources = ()
