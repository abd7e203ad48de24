"""What the host may do on a device's streams just now, and a stream of our own."""

import torch
from torch import Tensor

_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream: nothing may be read on the host then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_handle(device: torch.device) -> int:
    """Of the current stream of a GPU: what tells it from others, at a tenth of the cost of `torch.cuda.current_stream`;
    Triton asks in the same way."""
    return torch._C._cuda_getCurrentRawStream(0 if device.index is None else device.index)


def current(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a GPU: `torch.cuda.current_stream` at a tenth of its cost."""
    key = (device, current_handle(device))
    known = _streams.get(key)
    if known is None:
        known = _streams[key] = torch.cuda.current_stream(device)
    return known


def synchronize(device: torch.device) -> None:
    """Waits for all that was issued to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class SideStream:
    """A stream beside the one of the forwards, for what a forward needn't wait for. As a context, also within itself:
    what is issued there runs after all that was issued on the current stream before, or before the last `mark`. `join`
    is for whoever needs it done.

    Its priority is high: what runs there is short, and kernels of a forward would fill the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._main = self._stream
        self._depth = 0
        self._marked = False
        self.open = False
        """Whether something was issued there since everybody waits for it."""

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._main = current(self._device)
        if not self._marked:
            self._begun.record(self._main)
        self._marked = False
        self._begun.wait(self._stream)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if not self._depth:
            torch.cuda.set_stream(self._main)
            self.open = True

    def mark(self) -> None:
        """What is issued next on this stream waits for what the current one has to do by now, and for nothing after."""
        self._begun.record(current(self._device))
        self._marked = True

    def unmark(self) -> None:
        """Takes the last `mark` back, if nothing came of it."""
        self._marked = False

    def reads(self, *tensors: Tensor | None) -> None:
        """What was issued aside reads ``tensors``: their memory is handed out on no stream before that is done."""
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._stream)

    def join(self, for_good: bool = False) -> None:
        """What the current stream does from now on comes after what ran aside. ``for_good``: so does all that is issued
        from now on, on any stream that matters."""
        if not self.open:
            return
        # Whoever captures has waited for the device before, and may not wait for what lies outside of the graph.
        if not capturing(self._device):
            self._done.record(self._stream)
            self._done.wait(current(self._device))
        if for_good:
            self.open = False

    def follow(self) -> None:
        """What the current stream does from now on comes after what ran aside at the last `join`, whoever joined."""
        self._done.wait(current(self._device))
