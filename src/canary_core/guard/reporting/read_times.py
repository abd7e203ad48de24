"""`ReadTimes`: times of the host's reads of the device's counters and findings."""

import time

import torch

from canary_core.config import CanaryConfig

READ_S = 0.02
"""Least time between two reads, where not every forward is read: a read takes the host as long as the hooks of half a
forward, and forwards may be short."""

IDLE_READ_S = 0.5
"""Least time between two reads while the engine idles, and perhaps polls without a pause."""

JUDGED_FORWARDS = 4
"""Least number of forwards between two reads where the engine asks for the verdict on each: a read brings none."""


class ReadTimes:
    """After every ``CANARY_READ_INTERVAL``-th forward, with `READ_S` between; on a CPU and in raise mode after each
    one. While no forward is checked, now and then."""

    def __init__(self, config: CanaryConfig, device: torch.device) -> None:
        self._forwards = 1 if device.type == "cpu" or config.mode == "raise" else config.read_interval
        self._seconds = 0.0 if self._forwards == 1 else READ_S
        self._judged = 1 if config.mode == "raise" else max(self._forwards, JUDGED_FORWARDS)
        self._last = self._last_idle = 0.0

    def due(self, ends: int, now: float, judged: bool = False) -> bool:
        """Whether to read at the end of a step, the ``ends``-th, at time ``now``. ``judged``: the engine asks for the
        verdict on each forward (`Reader.judge`), and a read brings none earlier."""
        forwards, seconds = (self._judged, READ_S) if judged else (self._forwards, self._seconds)
        if ends % forwards or now - self._last < seconds:
            return False
        self._last = now
        return True

    def due_idle(self) -> bool:
        """Whether to read once more while no forward is checked."""
        now = time.monotonic()
        if now - self._last_idle < IDLE_READ_S:
            return False
        self._last_idle = now
        return True
