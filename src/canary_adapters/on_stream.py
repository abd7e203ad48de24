"""The engine's stream, made current at a third of the cost of `torch.cuda.stream`."""

from types import TracebackType

import torch

from canary_core.runtime.streams import current, make_current


class OnStream:
    """A context with ``stream`` as the current one of its device; reusable, also nested. Does nothing with None."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._before: list[tuple[torch.cuda.Stream, int]] = []

    def __enter__(self) -> None:
        stream = self._stream
        if stream is not None:
            self._before.append((current(stream.device), torch.cuda.current_device()))
            make_current(stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stream = self._stream
        if stream is not None:
            before, device = self._before.pop()
            make_current(before)
            if device != before.device_index:
                # To make a stream current makes its device current, too.
                torch.cuda.set_device(device)
