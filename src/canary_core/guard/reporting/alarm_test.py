"""`AlarmTest`: a probe sent through the whole alarm at intervals, which must arrive at its end."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle

from canary_core.errors import CanaryError
from canary_core.events import Event
from canary_core.guard.reporting.grouping import Incidents
from canary_core.ops.state import RegionState
from canary_core.records import COUNTERS, GAUGES, PROBE, Counter, ScrubWord
from canary_core.violation import Violation

LEAST_S, MOST_S = 1.0, 20.0
"""Bounds of the seconds between two probes; within them, the duration of a scrub's round."""

LATE_S = 30.0
"""A probe this late, while the scrub goes on, is lost."""

AGAIN_S = 5.0
"""Seconds until a probe is repeated: a slot may be forgotten between its listing and its comparison."""

MOST_TURNS = 12
"""Number of `AGAIN_S` to wait for an engine with long forwards to list slots of the region again."""

LEAST_LISTS, LEAST_TRIES = 3, 3
"""Reads with newly listed slots of the region that make a try count; and number of failed tries that count as a dead
alarm."""

LEAST_FORWARDS = 1000
"""Alternatively, number of checked forwards without a slot passed by the scrub."""


class AlarmTest:
    """Has the scrub compare a slot with a purposely wrong fingerprint (see `records.PROBE`), at least once a minute, by
    turns in each source: so each kernel of the scrub, the ring, the copy to the host, the grouping and the thread of
    incidents prove that a finding would be reported. A probe is swallowed; a real fault of the slot is not. The request
    is a fill of 8 bytes on the device beside a read of the counters, without a launch in a forward.

    ``states``: regions compared by the scrub; none: nothing to test. ``on_thread``: passes a function to the thread of
    incidents, False where there is none.
    """

    def __init__(self, states: Sequence[RegionState], on_thread: Callable[[Callable[[], None]], bool]) -> None:
        self._states = states
        self._slots = sum(state.region.slots for state in states)
        self.probe: Callable[[RegionState, int], None] = lambda state, source: None
        """`Scrub.probe`, once there is a scrub."""
        self._on_thread = on_thread
        ends = [(state, len(state.sources.labels)) for state in states]
        self._turns = cycle([
            (state, index) for state, end in ends for index in range(end - len(state.sources.judged), end)
        ])  # fmt: skip
        self._due: float | None = None
        self._asked = 0.0
        self._last = 0.0
        self._round = 0
        self._state: RegionState | None = None
        self._counters: Sequence[int] = ()
        self._still_since: Sequence[int] = ()
        self._lists = self._tries = 0
        self._where = self._reason = ""
        self.passed = 0
        """Probes that passed through the alarm."""
        self.last: float | None = None
        """When the last one did, in seconds since the epoch."""
        self.dead = False
        """Whether a probe did not come, and none has since."""

    @property
    def on(self) -> bool:
        """Whether there is anything to test."""
        return bool(self._states)

    def step(self, now: float, scrubs: bool, captured: bool) -> None:
        """At a read of the counters, on the stream of the scrub: asks for a probe if one is due. ``now``:
        `time.monotonic`; ``scrubs``: whether there is a scrub now; ``captured``: whether the scrub is in a graph, which
        probes until the request is withdrawn. Never captured."""
        counters = self._counters
        if not self._states or not scrubs or not counters:
            self._due = None
            return
        if captured and self._due is None and self._state is not None:
            self.probe(self._state, -1)
            self._state = None
        rounds = counters[Counter.SCRUBBED_SLOTS] // self._slots
        if self._due is None:
            if self.passed and now - self._last < (MOST_S if rounds == self._round else LEAST_S):
                return
            self._due, self._round, self._still_since, self._tries = now, rounds, counters, 0
            self._where = "no kernel has reported it"
        elif now - self._asked < (MOST_TURNS * AGAIN_S if 0 < self._lists < LEAST_LISTS else AGAIN_S):
            return
        else:
            self._tries += self._lists >= LEAST_LISTS
        self._asked, self._lists = now, 0
        self._state, source = next(self._turns)
        self.probe(self._state, source)

    def came(self, probe: Violation) -> None:
        """A probe's row was read and decoded: groups it, and sends it to the thread of incidents."""
        if self._due is None:
            return
        self._where = "its row was read, and it was not grouped"
        incidents = Incidents(_swallow, 0, _swallow)
        incidents.add(probe)
        if not incidents.tell():
            return
        self._where = "it was grouped, and the thread of incidents has not taken it"
        if not self._on_thread(self._arrived):
            self._arrived()

    def look(self, now: float) -> Event | None:
        """On the watch's thread: gives an ``alarm_dead`` event where a probe should have come and did not, once until
        one comes."""
        if self._due is None or self.dead or now - self._due < LATE_S:
            return None
        if self._tries < LEAST_TRIES and not self._scrub_stands_still():
            # The engine idles, is paused, or nothing that it wrote is left.
            return None
        reason = (
            f"a probe with a fingerprint that is wrong on purpose was asked for {now - self._due:.0f} s ago and was "
            f"not told ({self._where}): real findings would not be told either; restart the engine, and report it"
        )
        self._reason, self.dead = reason, True
        return Event("alarm_dead", "error", {"reason": reason, "tests_passed": self.passed})

    def require(self) -> None:
        """Raises `CanaryError` if a probe was lost: a test meant to stop at findings must not pass."""
        if self.dead:
            raise CanaryError(f"the alarm is dead: {self._reason}")

    def stats(self) -> dict[str, int]:
        """For `Canary.stats`."""
        return {"alarm_tests": self.passed, "alarm_dead": int(self.dead)} if self._states else {}

    def see(self, counters: Sequence[int]) -> None:
        """Takes the counters of a read, before its rows."""
        before, self._counters = self._counters, counters
        if not before or self._due is None or self._state is None:
            return
        self._lists += _listed(counters, self._state) > _listed(before, self._state)
        moved = any(_listed(counters, state) > _listed(before, state) for state in self._states)
        if moved or counters[Counter.SCRUBBED_SLOTS] > before[Counter.SCRUBBED_SLOTS]:
            self._still_since = counters
        if counters[PROBE] > before[PROBE]:
            self._where = "a kernel has reported it, and its row was not read"

    def _scrub_stands_still(self) -> bool:
        forwards = [counters[Counter.CHECKED_FORWARDS] for counters in (self._still_since, self._counters)]
        return forwards[1] - forwards[0] >= LEAST_FORWARDS

    def _arrived(self) -> None:
        self.passed += 1
        self.last = time.time()
        self._last = time.monotonic()
        self._due = None
        self.dead = False


def _listed(counters: Sequence[int], state: RegionState) -> int:
    """Slots of ``state`` listed by scrubs so far."""
    gauges = counters[COUNTERS + state.index * GAUGES :][:GAUGES]
    first = ScrubWord.RUNNING
    return gauges[ScrubWord.RUNNING_LISTED - first] + gauges[ScrubWord.PARKED_LISTED - first]


def _swallow(_told: object) -> None:
    """Nobody hears of a probe."""
