"""`Pause`: forwards without Canary, and the state of slots afterwards."""

import time

from canary_core.errors import CanaryError
from canary_core.events import Event
from canary_core.guard.sampling import SampledTokens
from canary_core.guard.slots import SlotEvents
from canary_core.runtime.streams import capturing
from canary_core.runtime.watchdog import Watchdog
from canary_core.runtime.workspace import Switch
from canary_core.watchers.tables import TableCheck

FIRST_REST_S, LONGEST_REST_S = 60.0, 3600.0
"""Bounds of the seconds without Canary after it found no memory."""


class Pause:
    """Between `begin` and `end`, called from any thread, forwards pass by unchecked.

    Nobody records their writes, so before the first such forward, and after the last, all slots become unknown: neither
    a comparison on a plugin's demand in between nor a later check judges by earlier records. A pause without a forward
    changes nothing.
    """

    def __init__(
        self, slots: SlotEvents, sampled: SampledTokens, tables: TableCheck, watchdog: Watchdog, switch: Switch
    ) -> None:
        self._slots = slots
        self._states = slots.workspace.states
        self._device = slots.workspace.device
        self._sampled = sampled
        self._tables = tables
        self._watchdog = watchdog
        self._switch = switch
        self.on = False
        """Whether forwards run without Canary until `end`."""
        self.missed = False
        """Whether the last forward passed by."""
        self._rests = 0
        self._unrecorded = False
        self._rest_ends: float | None = None
        self.passed_by = 0
        """How many were, in all pauses."""

    def begin(self, forwards: int, captured: bool) -> None:
        """See `Step.pause`. ``forwards``: number of forwards checked so far. ``captured``: whether a CUDA graph
        contains Canary's work."""
        if not self._switch.enabled:
            raise CanaryError("nothing is checked here any more, so there is nothing to pause")
        if captured:
            raise CanaryError(
                "Canary's work is part of a CUDA graph of this engine, which can't be told to leave it out"
            )
        self._rest_ends = None
        if not self.on:
            self.on = self._tables.paused = True
            self._switch.tell(Event("paused", "warning", {"forwards": forwards}))

    def rest(self) -> float:
        """The device has no memory left for Canary: a pause that ends by itself, after the returned number of seconds;
        each one is twice as long as the last."""
        seconds: float = min(FIRST_REST_S * 2**self._rests, LONGEST_REST_S)
        self._rests = min(self._rests + 1, 16)
        self._rest_ends = time.monotonic() + seconds
        # The forward under way is not recorded: as if it had passed by.
        self.on = self._tables.paused = self.missed = self._unrecorded = True
        return seconds

    def end(self) -> None:
        """See `Step.resume`."""
        self._rest_ends = None
        if self.on:
            self.on = self._tables.paused = False
            self._switch.tell(Event("resumed", "warning", {"unchecked_forwards": self.passed_by}))

    def passes(self) -> bool:
        """Whether the next forward passes by: then it counts. A captured one never does."""
        if capturing(self._device):
            return False
        if self._rest_ends is not None and time.monotonic() >= self._rest_ends:
            self.end()
        paused = self.on
        if paused != self.missed or self._unrecorded:
            self.missed, self._unrecorded = paused, False
            for name in self._states:
                self._slots.forget(name, None)
            self._sampled.forget()
        if paused:
            self.passed_by += 1
            self._watchdog.feed()
            self._slots.settle()
        return paused
