"""`Scrub`: how far the scrub goes in each region, after which forwards, and what that comes to.

From setting to kernel: `CanaryConfig.scrub_budget`, `Pace` (bytes of a scrub), `Stretch` (slots of each region),
`Cursor.SCRUB_SLOTS`, which the scrub's kernel reads.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from canary_core.config import ScrubBudget
from canary_core.ops.backends import Backend
from canary_core.ops.state import RegionState
from canary_core.records import Cursor
from canary_core.runtime.streams import synchronize

LAUNCH_S = 8e-6
"""Seconds of a scrub on a GPU in which it reads nothing, for each launch: `docs/benchmarks.md`, scrub/1MiB."""


class Pace:
    """Turns a `ScrubBudget` into scrubs: how many forwards share one, and how many bytes it reads.

    A share of time needs the forwards' length (on the host's clock), the scrub's speed (measured once, at attach) and
    ``launch_s``, the seconds of it that read nothing. Where those would be most of what a forward may spend, one scrub
    serves several forwards.

    A forward counts as long as the last one, at most as the last ones on average: after a long prefill, decode steps
    don't pay for its length.
    """

    WEIGHT = 0.05
    """Weight of the newest forward in the average."""
    LAUNCH_SHARE = 0.25
    """Most of a scrub's time that goes into its launches."""
    MOST_FORWARDS = 64
    """That share a scrub at most: its pause stays short, however small the budget."""

    def __init__(self, budget: ScrubBudget, bytes_per_s: float, launch_s: float = 0.0) -> None:
        self.budget = budget
        self._bytes_per_s = bytes_per_s
        self._launch_s = launch_s
        self._last: float | None = None
        self._average_s = 0.0
        self._step_s = 0.0

    @property
    def step_s(self) -> float | None:
        """Seconds of a step now; None until it is known."""
        return self._step_s or None

    @property
    def off(self) -> bool:
        """Whether there is never anything to scrub."""
        return not self.budget.share and not self.budget.step_bytes

    def step(self) -> None:
        """A forward ended now. A pause of over a second is the engine idling, not a forward."""
        now = time.perf_counter()
        if self._last is not None and now - self._last < 1.0:
            took = now - self._last
            self._average_s += (took - self._average_s) * (self.WEIGHT if self._average_s else 1.0)
            self._step_s = min(took, self._average_s)
        self._last = now

    def pause(self) -> None:
        """The engine idles: the time until the next forward is none."""
        self._last = None

    @property
    def forwards(self) -> int:
        """Forwards that share one scrub."""
        allowed_s = (self.budget.share or 0.0) * self._step_s
        if not (allowed_s and self._launch_s):
            return 1
        return max(1, min(math.ceil(self._launch_s / (self.LAUNCH_SHARE * allowed_s)), self.MOST_FORWARDS))

    def scrub_bytes(self, forwards: int) -> int:
        """Bytes that a scrub may read which serves so many ``forwards``."""
        if self.budget.share is None:
            return self.budget.step_bytes * forwards
        return int(max(self.budget.share * self._step_s * forwards - self._launch_s, 0.0) * self._bytes_per_s)

    def achieved(self, scrub_bytes: int, forwards: int, pool_bytes: int) -> dict[str, float]:
        """What scrubs of ``scrub_bytes`` after every so many ``forwards`` come to: ``scrub_share`` of the time, and
        ``scrub_period_s``, how long one round of ``pool_bytes`` takes. Empty until a forward's length is known."""
        if not (scrub_bytes and self._step_s and self._bytes_per_s):
            return {}
        between_s = forwards * self._step_s
        return {
            "scrub_share": (scrub_bytes / self._bytes_per_s + self._launch_s) / between_s,
            "scrub_period_s": pool_bytes / scrub_bytes * between_s,
        }


@dataclass(slots=True, eq=False)
class Stretch:
    """What one scrub passes of a region: ``slots`` of them from where the last one ended; 0 until it is set."""

    state: RegionState
    slots: int = 0

    def resize(self, slots: int) -> None:
        """How many slots the next scrubs pass, at least one. Small changes are left out: each is a tiny copy."""
        slots = max(min(slots, self.state.region.slots), 1)
        if self.slots and abs(slots - self.slots) * 5 <= self.slots:
            return
        self.slots = slots
        # Not an assignment: that copies the number from the host and waits for the device.
        self.state.cursors[Cursor.SCRUB_SLOTS].fill_(slots)


class Scrub:
    """Shares ``budget`` among the regions by the bytes of their pools. Fingerprints all slots when it is made, which
    measures the scrub's speed."""

    def __init__(self, states: Sequence[RegionState], backend: Backend, budget: ScrubBudget) -> None:
        self.stretches = tuple(Stretch(state) for state in states if state.sources.slot_bytes)
        self._slots = sum(state.region.slots for state in states)
        self._backend = backend
        self._pool_bytes = sum(state.pool_bytes for state in states)
        guarded = (stretch.state for stretch in self.stretches)
        launches = sum(len(state.sources.groups) for state in guarded if state.records.device.type != "cpu")
        self._pace = Pace(budget, self._baseline(), LAUNCH_S * launches)
        self._forwards = 1
        self._since = 0
        # A graph may be captured before the first forward ends, and a scrub that it lacks would be lacking for good.
        self.adjust(captured=False)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step of the engine now; None until it is known."""
        return self._pace.step_s

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
        for stretch in self.stretches:
            self._backend.scrub(stretch.state)

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
        for stretch in self.stretches:
            state = stretch.state
            stretch.resize(int(scrub_bytes * state.pool_bytes / self._pool_bytes / state.sources.slot_bytes))

    def stats(self, scrubbed_slots: int) -> dict[str, float]:
        """What the scrub comes to after ``scrubbed_slots`` in all, see `Canary.scrub_stats`."""
        coverage = scrubbed_slots / self._slots
        scrub_bytes = sum(stretch.slots * stretch.state.sources.slot_bytes for stretch in self.stretches)
        return {"scrub_coverage": coverage, **self._pace.achieved(scrub_bytes, self._forwards, self._pool_bytes)}

    def _baseline(self) -> float:
        """Fingerprints all slots; gives the speed in bytes a second."""
        if not self._pool_bytes:
            return 0.0
        device = self.stretches[0].state.records.device
        started = 0.0
        # The first round on a GPU compiles; its time says nothing of the scrub's.
        for _ in range(1 if device.type == "cpu" else 2):
            synchronize(device)
            started = time.perf_counter()
            for stretch in self.stretches:
                self._backend.baseline(stretch.state)
        synchronize(device)
        return self._pool_bytes / max(time.perf_counter() - started, 1e-9)
