"""`HostCopy`: tensors on their way from the device to the host, without a wait."""

import torch
from torch import Tensor


class HostCopy:
    """Copies of ``tensors``, as they are where the current stream has got to when this is made.

    On a GPU they go to pinned memory, and what they are copied from is kept until it was read; it must not be written
    to by another stream meanwhile. On a CPU nothing is copied: they are the tensors themselves. Never captured.

    tensors: the copies, in order; valid once they have `arrived`.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tuple(_to_host(tensor) for tensor in tensors)
        self._sources: tuple[Tensor, ...] = ()
        self._event: torch.cuda.Event | None = None
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None:
            self._sources = tensors
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def arrived(self) -> bool:
        """Whether ``tensors`` may be read. Never waits."""
        if self._event is not None and self._event.query():
            self._done()
        return self._event is None

    def wait(self) -> None:
        """Waits until ``tensors`` may be read."""
        if self._event is not None:
            self._event.synchronize()
            self._done()

    def _done(self) -> None:
        self._event = None
        self._sources = ()


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
