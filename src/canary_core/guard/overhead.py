"""`Overhead`: Canary's cost, measured by itself in one forward of many."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TypeVar

import torch

from canary_core.runtime.streams import current

Output = TypeVar("Output")

EVERY = 64
"""One forward of so many is measured."""

FIRST = 16
"""The first measured forward: earlier ones compile and warm up."""

KEPT = 64
"""Number of last measured forwards in the figures."""

NOTHING = nullcontext()

IDLE_S = 1.0
"""Longest measured forward; a longer one is dropped, since the engine idled."""


class DeviceSpan:
    """A context around device work that measures its time there. Never waits; reusable after the read."""

    def __init__(self) -> None:
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._device = torch.device("cuda")

    def on(self, device: torch.device) -> "DeviceSpan":
        """Work on the current stream of ``device``."""
        self._device = device
        return self

    def __enter__(self) -> None:
        self._began.record(current(self._device))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.record(current(self._device))

    def seconds(self) -> float | None:
        """The work's duration; None while the device is busy with it."""
        if not self._ended.query():
            return None
        return float(self._began.elapsed_time(self._ended)) / 1e3


class Overhead:
    """Measures one forward of `EVERY`: the host time of Canary's own code, and on a GPU the time of its kernels. In all
    others the cost is a look at ``due``.

    Host time covers the calls of `Step`, without the plugin's work around them or events of slots. On a CPU it has all
    of Canary's work. Device time covers the check, and the record with the scrub, whether or not the engine's own work
    hides them: an upper bound of the cost.
    """

    def __init__(self, device: torch.device) -> None:
        self.due = False
        """Whether the next, or running, forward is measured."""
        self._device = device
        self._spans = tuple(DeviceSpan() for _ in range(2)) if device.type == "cuda" else ()
        self._in_use = 0
        self._until = FIRST
        self._began = 0.0
        self._depth = 0
        self._entered = 0.0
        self._host_s = 0.0
        self._host: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._on_device: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._measured_s = 0.0

    def __enter__(self) -> None:
        self.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def enter(self) -> None:
        """Canary's own code begins; also within itself."""
        self._depth += 1
        if self._depth == 1:
            self._entered = time.perf_counter()

    def leave(self) -> None:
        """The measured call ends."""
        self._depth -= 1
        if self._depth == 0:
            self._host_s += time.perf_counter() - self._entered

    def leaving_out(self, forward: Callable[[], Output]) -> Callable[[], Output]:
        """``forward``, with its host time counted as the engine's."""

        def timed() -> Output:
            began = time.perf_counter()
            try:
                return forward()
            finally:
                self._host_s -= time.perf_counter() - began

        return timed

    def device(self, captured: bool) -> AbstractContextManager[None]:
        """Context around Canary's work on the current stream. A captured graph is not measured: a replay would repeat
        the measurement."""
        if not self.due or captured or self._in_use >= len(self._spans):
            return NOTHING
        self._in_use += 1
        return self._spans[self._in_use - 1].on(self._device)

    def step(self) -> None:
        """A step has ended, and with it the measurement."""
        if not self.due:
            self._until -= 1
            if self._until <= 0:
                self._begin()
            return
        self.due = False
        self._until = EVERY
        now = time.perf_counter()
        took = now - self._began
        if self._depth:
            # The end itself is not over yet.
            self._host_s += now - self._entered
        if took >= IDLE_S:
            self._in_use = 0
            return
        self._host.append((self._host_s, took))
        self._measured_s = took

    def read(self) -> None:
        """Takes the device's measurement, if done. Never waits."""
        if self._in_use and not self.due:
            seconds = [span.seconds() for span in self._spans[: self._in_use]]
            if None not in seconds:
                self._on_device.append((sum(s or 0.0 for s in seconds), self._measured_s))
                self._in_use = 0

    def stats(self) -> dict[str, float]:
        """``overhead_host`` and, on a GPU, ``overhead_device``: shares of the engine's steps, over the last `KEPT`
        measured ones. Empty until one was measured."""
        parts = {"overhead_host": list(self._host), "overhead_device": list(self._on_device)}
        return {
            name: sum(ours for ours, _ in measured) / max(sum(step for _, step in measured), 1e-9)
            for name, measured in parts.items()
            if measured
        }

    def _begin(self) -> None:
        self.due = True
        self._host_s = 0.0
        self._began = time.perf_counter()
