"""A pretended device with streams and events. Nothing runs beside anything here; each stream only knows what its work
comes after, as the events say that it waited for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from canary_core.runtime import side_stream

MOST_STREAMS = 4


class Stream:
    """``after``: for each stream, how many of its launches are done before what is issued here next."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.after = [0] * MOST_STREAMS
        self.launches: list[str] = []
        """What was issued here, in order."""

    def launch(self, what: str) -> int:
        """Something is issued here; gives its number, from 1."""
        self.launches.append(what)
        self.after[self.number] = len(self.launches)
        return len(self.launches)


class Event:
    """As `LeanEvent`, for what `SideStream` does with it."""

    def __init__(self) -> None:
        self._after = [0] * MOST_STREAMS

    def record(self, stream: Stream) -> None:
        """What ``stream`` has to do by now."""
        self._after = list(stream.after)

    def wait(self, stream: Stream) -> None:
        """What ``stream`` does from now on comes after that."""
        stream.after = [max(pair) for pair in zip(stream.after, self._after, strict=True)]


class Device:
    """``main``: the stream of the forwards. ``now``: the current one."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.main = self.now = self.stream("main")

    def stream(self, name: str) -> Stream:
        """A new one."""
        self.streams.append(Stream(len(self.streams), name))
        return self.streams[-1]

    def wait(self, stream: Stream, other: Stream) -> None:
        """What ``stream`` does from now on comes after what ``other`` has to do by now."""
        event = Event()
        event.record(other)
        event.wait(stream)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """``stream`` is the current one within."""
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def side_stream(self, monkeypatch: pytest.MonkeyPatch) -> side_stream.SideStream:
        """Canary's own, unchanged, on this device."""

        def switch_to(stream: Stream) -> Callable[[], None]:
            def switch() -> None:
                self.now = stream

            return switch

        monkeypatch.setattr(side_stream, "switch_to", switch_to)
        with monkeypatch.context() as made:
            made.setattr(torch.cuda, "Stream", lambda *args, **kwargs: self.stream("side"))
            made.setattr(side_stream, "LeanEvent", Event)
            made.setattr(side_stream, "current_of", lambda device: lambda: self.now)
            side = side_stream.SideStream(torch.device("cpu"))
        return side
