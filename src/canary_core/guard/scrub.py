"""`Scrub`: length of the scrub in each region, its forwards, and its figures.

From setting to kernel: `CanaryConfig.scrub_budget`, `Pace` (bytes of a scrub), `Stretch` (slots of each region),
`Cursor.SCRUB_SLOTS`, read by the scrub's kernel. Back to the host: the gauges behind the counters, `Progress`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from canary_core.config import ScrubBudget
from canary_core.ops.backends import Backend
from canary_core.ops.state import RegionState
from canary_core.records import COUNTERS, GAUGES, SCRUB_GAUGES, Cursor, ScrubWord
from canary_core.runtime.streams import synchronize

LAUNCH_S = 8e-6
"""Seconds per launch of an empty scrub on a GPU: `docs/benchmarks.md`, scrub/1MiB."""

LEAST_BYTES = 1 << 20
"""Least bytes of a scrub, where that many are written and the budget is a share of time: a launch takes as long without
them, and on a CPU most of the time goes into calls. So a pool of a few MB is read every few forwards."""

CPU_FORWARDS = 4
"""Forwards that share a scrub on a CPU, where the budget is a share of time."""

RUNNING_S = 1.0
"""Time for one comparison of all slots of running requests, if their share of a scrub suffices. The rest of the share
goes to parked slots."""

RUNNING_SHARE, MOST_RUNNING_SHARE = 2 / 3, 7 / 8
"""Least share of a scrub for running slots, if they need it while anything is parked; and the largest. Where more of
the written slots are running, their share is as large, so that coming first never means coming later."""

PASSED_FOR_ONE, LEAST_PASSED = 16, 16384
"""Slots passed for each one compared by a scrub, and the least number: passing one takes a thirtieth of the time to
read one of Llama-8B's, and overlaps with reading."""

CALIBRATION_BYTES, CALIBRATION_STRIDE = 8 << 30, 3
"""How much is read at most to measure the scrub's speed on a GPU, of each third slot: those of running requests don't
lie side by side either."""


class Pace:
    """Turns a `ScrubBudget` into scrubs: number of forwards per scrub, and bytes per scrub.

    A share of time needs the forwards' length (on the host's clock), the scrub's speed (measured once, at attach) and
    ``launch_s``, the seconds without reading. If those were most of a forward's budget, one scrub serves several
    forwards.

    A forward counts as long as the last one, at most as the average of the last ones: after a long prefill, decode
    steps don't pay for its length.
    """

    WEIGHT = 0.05
    """Weight of the newest forward in the average."""
    LAUNCH_SHARE = 1 / 16
    """Largest share of launches in a scrub's time."""
    MOST_FORWARDS = 64
    """Most forwards per scrub: the pause stays short, however small the budget."""

    def __init__(self, budget: ScrubBudget, bytes_per_s: float, launch_s: float = 0.0) -> None:
        self.budget = budget
        self.bytes_per_s = bytes_per_s
        """The scrub's speed; 0.0 while unknown."""
        self._launch_s = launch_s
        self._last: float | None = None
        self._average_s = 0.0
        self._step_s = 0.0
        self.busy_s = 0.0
        """Length of all forwards so far, except those longer than a second."""

    @property
    def step_s(self) -> float | None:
        """Present length of a step in seconds; None while unknown."""
        return self._step_s or None

    @property
    def off(self) -> bool:
        """Whether there is never anything to scrub."""
        return not self.budget.share and not self.budget.step_bytes

    def step(self) -> float:
        """A forward ended now, which is the answer, in seconds of `time.perf_counter`. A pause of over a second is the
        engine idling, not a forward."""
        now = time.perf_counter()
        if self._last is None:
            self.busy_s += self._average_s
        elif now - self._last < 1.0:
            took = now - self._last
            self._average_s += (took - self._average_s) * (self.WEIGHT if self._average_s else 1.0)
            self._step_s = min(took, self._average_s)
            self.busy_s += took
        self._last = now
        return now

    def pause(self) -> float:
        """The engine idles: the time until the next forward does not count. Returns the present time, as `step`."""
        self._last = None
        return time.perf_counter()

    @property
    def average_s(self) -> float:
        """Length of a forward; 0.0 until one is known."""
        return self._average_s

    @property
    def forwards(self) -> int:
        """Forwards that share one scrub."""
        if self.budget.share is None:
            return 1
        if not self._launch_s:
            return CPU_FORWARDS
        allowed_s = self.budget.share * self._step_s
        if not allowed_s:
            return 1
        return max(1, min(math.ceil(self._launch_s / (self.LAUNCH_SHARE * allowed_s)), self.MOST_FORWARDS))

    def scrub_bytes(self, forwards: int) -> int:
        """Bytes allowed to a scrub for so many ``forwards``."""
        if self.budget.share is None:
            return self.budget.step_bytes * forwards
        bytes_ = max(self.budget.share * self._step_s * forwards - self._launch_s, 0.0) * self.bytes_per_s
        return max(int(bytes_), LEAST_BYTES)

    def share(self, scrub_bytes: int, forwards: int) -> float | None:
        """The share of time of scrubs of ``scrub_bytes`` after every so many ``forwards``; None until a forward's
        length and the scrub's speed are known."""
        if not (self._step_s and self.bytes_per_s):
            return None
        return (scrub_bytes / self.bytes_per_s + self._launch_s) / (forwards * self._step_s)


class Round:
    """Duration of the scrub's pass over all ``slots`` of a region in search of one sort, and the number found."""

    SAMPLES = 256
    """Most samples of a round; a round of fewer reads has one for each."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._samples: deque[tuple[float, int, int]] = deque()

    def add(self, at_s: float, passed: int, listed: int) -> bool:
        """Until ``at_s`` so many slots had been ``passed`` since start, and so many ``listed``. Whether that is far
        enough for a sample."""
        samples = self._samples
        if samples and passed - samples[-1][1] < self._slots / self.SAMPLES:
            return False
        samples.append((at_s, passed, listed))
        while len(samples) > 1 and passed - samples[1][1] >= self._slots:
            samples.popleft()
        return True

    @property
    def last(self) -> tuple[float, int] | None:
        """Seconds of the last whole round, rounded up, and number of slots listed in it; None before the end of the
        first."""
        if len(self._samples) < 2:
            return None
        (began_s, began, listed), (end_s, end, ended) = self._samples[0], self._samples[-1]
        if end - began < self._slots:
            return None
        return end_s - began_s, round((ended - listed) * self._slots / (end - began))


class Progress:
    """Progress of one region's scrub: over slots of requests (``running``), and over parked ones."""

    def __init__(self, slots: int) -> None:
        self.running, self.parked = Round(slots), Round(slots)
        self.written: tuple[int, int] | None = None
        """How many slots are running and how many parked; None until both are known."""

    def add(self, at_s: float, gauges: Sequence[int]) -> None:
        """Adds the region's gauges as of ``at_s``."""
        # In the order of `ScrubWord`.
        running_passed, running_listed, parked_passed, parked_listed = gauges
        sampled = self.running.add(at_s, running_passed, running_listed)
        if not (self.parked.add(at_s, parked_passed, parked_listed) or sampled):
            return
        running, parked = self.running.last, self.parked.last
        if running is not None and parked is not None:
            self.written = running[1], parked[1]


@dataclass(slots=True, eq=False)
class Stretch:
    """One scrub's part of a region: up to ``slots``, ``running`` of them from running requests before parked ones have
    a turn. 0 until set."""

    state: RegionState
    slots: int = 0
    running: int = 0
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = Progress(self.state.region.slots)

    def resize(self, slots: int, running_share: float = 1.0) -> None:
        """Sets the number of slots listed by the next scrubs, at least one and as many as a list holds, and the share
        of running ones first. Small changes are left out: each is a tiny copy."""
        most = self.state.region.slots
        slots = max(min(slots, self.state.listed_slots), 1)
        # Not assignments: those copy the number from the host and wait for the device.
        if abs(slots - self.slots) * 5 > self.slots:
            self.slots = slots
            self.state.cursors[Cursor.SCRUB_SLOTS].fill_(slots)
            self.state.cursors[Cursor.SCRUB_PASS].fill_(min(max(PASSED_FOR_ONE * slots, LEAST_PASSED), most))
        running = math.ceil(self.slots * running_share)
        if abs(running - self.running) * 20 > self.running:
            self.running = running
            self.state.cursors[Cursor.SCRUB_RUNNING].fill_(running)

    def running_share(self, between_s: float) -> float:
        """Share of a scrub for running slots first, with one scrub every ``between_s``."""
        written = self.progress.written
        if written is None or not self.slots:
            return RUNNING_SHARE
        running, parked = written
        most = min(max(running / max(running + parked, 1), RUNNING_SHARE), MOST_RUNNING_SHARE)
        return min(running * between_s / RUNNING_S / self.slots, most)


class Scrub:
    """Shares ``budget`` among the regions by their written bytes. `start` comes before the first forward."""

    def __init__(self, states: Sequence[RegionState], backend: Backend, budget: ScrubBudget) -> None:
        self.stretches = tuple(Stretch(state) for state in states if state.sources.slot_bytes)
        self._slots = sum(state.region.slots for state in states)
        self._backend = backend
        guarded = (stretch.state for stretch in self.stretches)
        launches = sum(len(state.sources.groups) for state in guarded if state.records.device.type != "cpu")
        self.pace = Pace(budget, 0.0, LAUNCH_S * launches)
        """Is told how forwards follow each other."""
        self._forwards = 1
        self._since = 0
        self._probed: RegionState | None = None
        self.started = False
        """Whether `start` was called."""

    def start(self) -> None:
        """Fingerprints all slots, and measures the scrub's speed. Never captured."""
        self.started = True
        self.pace.bytes_per_s = self._baseline()
        for stretch in self.stretches:
            _forget_foreign(stretch.state)
        # A graph may be captured before the first forward ends, and a scrub that it lacks would be lacking for good.
        self.adjust(captured=False)

    @property
    def step_s(self) -> float | None:
        """Present length of the engine's step in seconds; None while unknown."""
        return self.pace.step_s

    @property
    def budget(self) -> ScrubBudget:
        """May be set while nothing is captured; takes effect with the next `adjust`."""
        return self.pace.budget

    @budget.setter
    def budget(self, budget: ScrubBudget) -> None:
        self.pace.budget = budget

    def run(self, captured: bool) -> None:
        """After a forward: scrubs, if it is due or ``captured``, since a graph's launches are always the same. May be
        captured."""
        self._since += 1
        if (self._since < self._forwards and not captured) or self.pace.off:
            return
        self._since = 0
        for stretch in self.stretches:
            if stretch.state.readable:
                # A graph's launches are always the same, so that one always looks whether a probe is asked for.
                probed = captured or self._probed is stretch.state
                self._backend.scrub(stretch.state, probed)
                if probed:
                    self._probed = None

    def probe(self, state: RegionState, source: int) -> None:
        """On the stream of the scrub: the next one of ``state`` is probed in ``source``; -1: none is any more."""
        state.cursors[Cursor.PROBE].fill_(source + 1)
        self._probed = None if source < 0 else state

    def observe(self, counters: Sequence[int]) -> None:
        """Takes the counters of a read, with the gauges behind them. Host only."""
        for stretch in self.stretches:
            gauges = counters[COUNTERS + stretch.state.index * GAUGES :][:SCRUB_GAUGES]
            stretch.progress.add(self.pace.busy_s, gauges)

    def adjust(self, captured: bool) -> None:
        """Sets the forwards between the next scrubs, and their number of slots. Host only."""
        if self.pace.off:
            return
        self._forwards = 1 if captured else self.pace.forwards
        scrub_bytes = self.pace.scrub_bytes(self._forwards)
        between_s = self._forwards * self.pace.average_s
        weights = [self._written_bytes(stretch) or stretch.state.pool_bytes for stretch in self.stretches]
        for stretch, weight in zip(self.stretches, weights, strict=True):
            slots = int(scrub_bytes * weight / sum(weights) / stretch.state.sources.slot_bytes)
            stretch.resize(slots, stretch.running_share(between_s))

    def stats(self, scrubbed_slots: int) -> dict[str, float]:
        """Figures of the scrub after ``scrubbed_slots`` in all, see `Canary.scrub_stats`."""
        told: dict[str, float] = {"scrub_coverage": scrubbed_slots / self._slots}
        scrub_bytes = 0
        for stretch in self.stretches:
            budget_bytes = stretch.slots * stretch.state.sources.slot_bytes
            written_bytes = self._written_bytes(stretch)
            scrub_bytes += budget_bytes if written_bytes is None else min(budget_bytes, written_bytes)
        share = None if self.pace.off else self.pace.share(scrub_bytes, self._forwards)
        if share is not None:
            told["scrub_share"] = share
        rounds = [(s.progress.running.last, s.progress.parked.last) for s in self.stretches]
        running = [running[0] for running, _ in rounds if running is not None]
        every = [max(running[0], parked[0]) for running, parked in rounds if running and parked]
        if running and len(running) == len(rounds):
            told["live_period_s"] = max(running)
        if every and len(every) == len(rounds):
            told["scrub_period_s"] = max(every)
        return told

    def _written_bytes(self, stretch: Stretch) -> int | None:
        """Bytes of the region's written slots; None while unknown."""
        written = stretch.progress.written
        return None if written is None else sum(written) * stretch.state.sources.slot_bytes

    def _baseline(self) -> float:
        """Fingerprints all slots; gives the scrub's speed in bytes a second."""
        if not self.stretches:
            return 0.0
        device = self.stretches[0].state.records.device
        if device.type == "cpu":
            pool_bytes = sum(stretch.state.pool_bytes for stretch in self.stretches)
            return pool_bytes / _seconds(self._fingerprint_all, device)
        if self._backend.compile_together is not None:
            self._backend.compile_together(self.launch_all)
        self._fingerprint_all()
        alike = (device, *((s.state.sources.slot_bytes, s.state.pool_bytes.bit_length()) for s in self.stretches))
        if alike not in _speeds:
            _speeds[alike] = self._measured(device)
        return _speeds[alike]

    def _measured(self, device: torch.device) -> float:
        """The scrub's speed on a GPU. Waits for the device."""
        counters = self.stretches[0].state.shared.counters
        before = counters.clone()
        listed_bytes = sum(_list_some(stretch.state) for stretch in self.stretches)
        most = sum(min(CALIBRATION_BYTES, s.state.pool_bytes // CALIBRATION_STRIDE) for s in self.stretches)
        times = max(most // listed_bytes, 1)  # A list may be too short for all.
        # The first one may still have to be compiled, or loaded, which waits for the device: a probed one, too.
        for stretch in self.stretches:
            self._backend.scrub(stretch.state, True)
        self._scrub_all()
        speed = times * listed_bytes / _seconds(lambda: self._scrub_all(times), device)
        counters.copy_(before)
        for stretch in self.stretches:
            stretch.state.cursors[Cursor.SCRUB :].zero_()
        return speed

    def launch_all(self) -> None:
        """The launches of `start` and of probes, once."""
        self._fingerprint_all()
        self._scrub_all()
        for stretch in self.stretches:
            self._backend.scrub(stretch.state, True)

    def _fingerprint_all(self) -> None:
        for stretch in self.stretches:
            self._backend.baseline(stretch.state)

    def _scrub_all(self, times: int = 1) -> None:
        for _ in range(times):
            for stretch in self.stretches:
                self._backend.scrub(stretch.state, False)


FORGOTTEN_AT_ONCE = 1 << 18
"""Slots whose fingerprints are looked at together: bounds the memory for it."""

_speeds: dict[tuple[object, ...], float] = {}
"""The speed of scrubs of pools alike. A cache of `generate()` has a pool of its own, and to measure is to wait for the
whole prefill."""


def _forget_foreign(state: RegionState) -> None:
    """Makes the fingerprints of all slots with other bytes than zeros unknown. Bytes from before the engine's first
    write prove nothing: memory that was given back may hold the KV of the same prompts, so a write changes nothing.
    Zeros are a fill, and no KV of a token: a first write that leaves zeros is lost."""
    zeros = state.sources.zeros
    for piece in state.fingerprints.split(FORGOTTEN_AT_ONCE):
        piece.masked_fill_(piece != zeros, 0)


def _list_some(state: RegionState) -> int:
    """Lists slots for the measurement, without a record of a write; returns their bytes."""
    most = max(CALIBRATION_BYTES // state.sources.slot_bytes, 1)
    end = min(state.region.slots, CALIBRATION_STRIDE * min(most, state.listed_slots))
    slots = torch.arange(0, end, CALIBRATION_STRIDE, device=state.listed.device)
    state.listed[0, : len(slots)] = slots.int()
    state.cursors[Cursor.SCRUB + ScrubWord.LIST] = len(slots)
    return len(slots) * state.sources.slot_bytes


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return max(time.perf_counter() - began, 1e-9)
