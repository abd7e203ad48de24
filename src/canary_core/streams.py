"""What the host may do on a device's streams just now, and a stream of our own."""

import torch


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream: nothing may be read on the host then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_handle(device: torch.device) -> int:
    """Of the current stream of a GPU: what tells it from others, at a tenth of the cost of `torch.cuda.current_stream`;
    Triton asks in the same way."""
    return torch._C._cuda_getCurrentRawStream(0 if device.index is None else device.index)


def synchronize(device: torch.device) -> None:
    """Waits for all that was issued to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Aside:
    """A stream beside the one of the forwards, for what a forward needn't wait for. As a context: what is issued within
    runs there, after all that was issued before on the current stream. `join` is for whoever needs it done.

    Its priority is high: what runs there is short, and kernels of a forward would fill the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._within = torch.cuda.stream(self._stream)
        self._open = False

    def __enter__(self) -> None:
        self._begun.record()
        self._stream.wait_event(self._begun)
        self._within.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._within.__exit__(None, None, None)
        self._done.record(self._stream)
        self._open = True

    def join(self, for_good: bool = False) -> None:
        """What the current stream does from now on comes after what ran aside. ``for_good``: so does all that is issued
        from now on, on any stream that matters."""
        if self._open:
            self._done.wait()
            self._open = not for_good
