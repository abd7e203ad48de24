"""`Scrub`: how far the scrub goes in each region, after which forwards, and what that comes to."""

import time
from collections.abc import Sequence

from canary_core.ops.backends import Backend
from canary_core.ops.state import RegionState
from canary_core.runtime.budget import Pace, ScrubBudget
from canary_core.runtime.streams import synchronize

LAUNCH_S = 8e-6
"""Seconds of a scrub on a GPU in which it reads nothing, for each launch: `docs/benchmarks.md`, scrub/1MiB."""


class Scrub:
    """Shares ``budget`` among the regions by the bytes of their pools. Fingerprints all slots when it is made, which
    measures the scrub's speed."""

    def __init__(self, states: Sequence[RegionState], backend: Backend, budget: ScrubBudget) -> None:
        self._states = [state for state in states if state.sources.slot_bytes]
        self._slots = sum(state.region.slots for state in states)
        self._backend = backend
        self._pool_bytes = sum(state.pool_bytes for state in states)
        launches = sum(len(state.sources.groups) for state in self._states)
        on_device = bool(self._states) and self._states[0].records.device.type != "cpu"
        self._pace = Pace(budget, self._baseline(), LAUNCH_S * launches if on_device else 0.0)
        self._forwards = 1
        self._since = 0
        # A graph may be captured before the first forward ends, and a scrub that it lacks would be lacking for good.
        self.adjust(captured=False)

    @property
    def budget(self) -> ScrubBudget:
        """May be set while nothing is captured; takes effect with the next `adjust`."""
        return self._pace.budget

    @budget.setter
    def budget(self, budget: ScrubBudget) -> None:
        self._pace.budget = budget

    def run(self, captured: bool) -> None:
        """After a forward: scrubs, if it is its turn or ``captured``, since a graph's launches are always the same. May
        be captured."""
        if self._pace.off:
            return
        self._since += 1
        if self._since < self._forwards and not captured:
            return
        self._since = 0
        for state in self._states:
            self._backend.scrub(state)

    def step(self, idle: bool) -> None:
        """Host only. A forward ended now, or the engine idles."""
        if idle:
            self._pace.pause()
        else:
            self._pace.step()

    def adjust(self, captured: bool) -> None:
        """Host only. Sets after how many forwards the next scrubs come, and how many slots they pass."""
        if self._pace.off:
            return
        self._forwards = 1 if captured else self._pace.forwards
        scrub_bytes = self._pace.scrub_bytes(self._forwards)
        for state in self._states:
            state.set_scrub_slots(int(scrub_bytes * state.pool_bytes / self._pool_bytes / state.sources.slot_bytes))

    def stats(self, scrubbed_slots: int) -> dict[str, float]:
        """What the scrub comes to after ``scrubbed_slots`` in all, see `Canary.scrub_stats`."""
        coverage = scrubbed_slots / self._slots
        scrub_bytes = sum(state.scrub_slots * state.sources.slot_bytes for state in self._states)
        return {"scrub_coverage": coverage, **self._pace.achieved(scrub_bytes, self._forwards, self._pool_bytes)}

    def _baseline(self) -> float:
        """Fingerprints all slots; gives the speed in bytes a second."""
        if not self._pool_bytes:
            return 0.0
        device = self._states[0].records.device
        started = 0.0
        # The first round on a GPU compiles; its time says nothing of the scrub's.
        for _ in range(1 if device.type == "cpu" else 2):
            synchronize(device)
            started = time.perf_counter()
            for state in self._states:
                self._backend.baseline(state)
        synchronize(device)
        return self._pool_bytes / max(time.perf_counter() - started, 1e-9)
