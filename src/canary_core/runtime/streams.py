"""State of a device's streams: current stream, capture, events."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor


@cache
def _on_gpu(device: torch.device) -> bool:
    """Asked several times a forward, and the name of a device's type is a new string each time."""
    return device.type == "cuda"


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream: nothing may be read on the host then."""
    return _on_gpu(device) and torch._C._cuda_isCurrentStreamCapturing()


class LeanEvent:
    """A `torch.cuda.Event` without torch's Python around each call, at two thirds of the cost. ``record`` and ``wait``
    need a stream."""

    __slots__ = ("query", "record", "wait")

    def __init__(self) -> None:
        plain: Any = super(torch.cuda.Event, torch.cuda.Event())
        self.record: Callable[[torch.cuda.Stream], None] = plain.record
        self.wait: Callable[[torch.cuda.Stream], None] = plain.wait
        self.query: Callable[[], bool] = plain.query


def current_handle(device: torch.device) -> int:
    """Handle of the current stream of a GPU, different for each stream, at a tenth of the cost of
    `torch.cuda.current_stream`; Triton asks in the same way."""
    return torch._C._cuda_getCurrentRawStream(0 if device.index is None else device.index)


class BatchRows:
    """A tensor with a row for each request of a batch, made anew where the requests are others than those of the last
    call on the current stream. Each stream has its own: it doesn't wait for the copy that another has issued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: dict[int, tuple[list[str], Tensor]] = {}

    def of(self, requests: Sequence[str], make: Callable[[], Tensor]) -> Tensor:
        """The rows of ``requests``: the last ones, or those of ``make``, issued on the current stream. Must not be
        written to."""
        stream = current_handle(self._device) if _on_gpu(self._device) else 0
        last = self._last.get(stream)
        if last is None or last[0] != requests:
            last = self._last[stream] = list(requests), make()
        return last[1]

    def clear(self) -> None:
        """The next call makes the rows anew."""
        self._last.clear()


def current(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a GPU: `torch.cuda.current_stream` at a tenth of the cost."""
    return current_of(device)()


@cache
def current_of(device: torch.device) -> Callable[[], torch.cuda.Stream]:
    """`current`, for whoever asks for the same device again and again."""
    handle_of, index = torch._C._cuda_getCurrentRawStream, 0 if device.index is None else device.index
    streams: dict[int, torch.cuda.Stream] = {}

    def current() -> torch.cuda.Stream:
        handle = handle_of(index)
        known = streams.get(handle)
        if known is None:
            known = streams[handle] = torch.cuda.current_stream(device)
        return known

    return current


def make_current(stream: torch.cuda.Stream) -> None:
    """`torch.cuda.set_stream`, at a third of the cost."""
    switch_to(stream)()


def switch_to(stream: torch.cuda.Stream) -> Callable[[], None]:
    """`make_current`, for whoever goes to the same stream again and again."""
    return partial(torch._C._cuda_setStream, stream.stream_id, stream.device_index, stream.device_type)


def synchronize(device: torch.device) -> None:
    """Waits for all work issued to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StreamSet:
    """The streams of a work done bit by bit. Empty on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._streams: dict[int, torch.cuda.Stream] = {}

    def add(self) -> None:
        """Something was issued on the current stream."""
        if self._device is not None and current_handle(self._device) not in self._streams:
            self._streams[current_handle(self._device)] = current(self._device)

    def only_current(self) -> bool:
        """Whether all of the work was issued on the current stream, so that later work there runs after it."""
        return self._device is None or self._streams.keys() <= {current_handle(self._device)}

    def ready(self) -> list[torch.cuda.Event]:
        """Events after which all of the work is done: one for each stream, recorded now."""
        return [stream.record_event() for stream in self._streams.values()]
