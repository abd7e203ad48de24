"""`Scrub`: how far the scrub goes in each region after a forward, and what that comes to."""

import time
from collections.abc import Sequence

from canary_core.backends import Backend
from canary_core.budget import Pace, ScrubBudget
from canary_core.state import RegionState
from canary_core.streams import synchronize


class Scrub:
    """Shares ``budget`` among the regions by the bytes of their pools. Fingerprints all slots when it is made, which
    measures the scrub's speed."""

    def __init__(self, states: Sequence[RegionState], backend: Backend, budget: ScrubBudget) -> None:
        self._states = states
        self._pool_bytes = sum(state.pool_bytes for state in states)
        self.pace = Pace(budget, self._baseline(backend))
        # A graph may be captured before the first step ends, and a scrub that it lacks would be lacking for good.
        self.adjust()

    def adjust(self) -> None:
        """Sets how many slots the next scrubs pass. Host only."""
        if self.pace.off:
            return
        for state in self._states:
            if not state.slot_bytes:
                continue
            share = state.pool_bytes / self._pool_bytes
            state.set_scrub_slots(int(self.pace.step_bytes * share / state.slot_bytes))

    def stats(self, scrubbed_slots: int) -> dict[str, float]:
        """What the scrub comes to after ``scrubbed_slots`` in all, see `Canary.scrub_stats`."""
        coverage = scrubbed_slots / sum(state.region.slots for state in self._states)
        step_bytes = sum(state.scrub_slots * state.slot_bytes for state in self._states)
        return {"scrub_coverage": coverage, **self.pace.achieved(step_bytes, self._pool_bytes)}

    def _baseline(self, backend: Backend) -> float:
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
                backend.baseline(state)
        synchronize(device)
        return self._pool_bytes / max(time.perf_counter() - started, 1e-9)
