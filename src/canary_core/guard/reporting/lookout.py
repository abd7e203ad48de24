"""`Lookout`: whether one Canary still sees its engine, reported by the process's watch."""

from collections.abc import Callable
from contextlib import ExitStack

from canary_core.errors import error_text
from canary_core.events import Event
from canary_core.guard.reporting.findings import Reporter
from canary_core.runtime.watch import WATCH
from canary_core.runtime.workspace import Switch

STUCK_S, STUCK_STEPS = 20.0, 3
"""A copy of the counters on its way for so long, over so many steps, will not arrive."""


class Lookout:
    """Looks at one Canary from the watch's thread, with facts known to the host: at its `Witness`, its `AlarmTest`, the
    pending copy of the counters, and ``unable``, which gives an event where something that was asked for can't be done.
    Each sort of trouble is one event, reported once until over. Has ``findings`` tell what was counted only."""

    def __init__(self, switch: Switch, findings: Reporter, unable: Callable[[], Event | None]) -> None:
        self._switch = switch
        self._read_back = findings.read_back
        self._witness = findings.witness
        self._alarm = findings.alarm
        self._untold = findings.untold
        self._unable = unable
        self._stuck = self._watch_dead = self._unable_told = False

    def look(self, now: float) -> None:
        """See `Watch.look`."""
        for untold in self._untold:
            untold.look(now)
        if not self._switch.enabled:
            return
        with ExitStack() as looks:
            # All of them, whichever fails.
            for look in (self._read, self._alarm.look, self._witness.look, self._look_at_ability):
                looks.callback(self._tell, look, now)
            self._look_at_watch()

    def look_back(self, now: float) -> None:
        """From the engine's thread, at intervals: whether the watch still looks, and its looks do not fail."""
        dead = WATCH.dead(now)
        if dead and not self._watch_dead:
            self._switch.tell(_dead_thread("canary-watch"))
        self._watch_dead = dead
        self._look_at_watch()

    def _tell(self, look: Callable[[float], Event | None], now: float) -> None:
        event = look(now)
        if event is not None:
            self._switch.tell(event)

    def _look_at_ability(self, now: float) -> Event | None:
        event = None if self._unable_told else self._unable()
        self._unable_told = self._unable_told or event is not None
        return event

    def _look_at_watch(self) -> None:
        for event in (*map(_dead_thread, WATCH.died()), *map(_broken_look, WATCH.broken())):
            self._switch.tell(event)

    def _read(self, now: float) -> Event | None:
        began, asked = self._read_back.waiting
        stuck = began is not None and now - began > STUCK_S and asked >= STUCK_STEPS
        told, self._stuck = self._stuck, stuck
        if not stuck or told or began is None:
            return None
        reason = (
            f"forwards go on, and a copy of the counters that was begun {now - began:.0f} s ago has not arrived: the "
            "stream that checks run on stands still, so nothing of what they find can be told; is the device lost, or "
            "does another stream keep it busy?"
        )
        return Event("silence", "error", {"reason": reason})


def _dead_thread(name: str) -> Event:
    """A thread of Canary's own has ended too early."""
    reason = f"the thread {name!r} of Canary has ended, and with it what it does; restart the engine at the next chance"
    return Event("silence", "error", {"reason": reason, "thread": name})


def _broken_look(error: Exception) -> Event:
    """A look of the watch fails: its subject is not reported on."""
    failed = error_text(error)
    reason = f"a look at whether Canary still sees its engine fails ({failed}): it would not be told; please report it"
    return Event("silence", "error", {"reason": reason, "error": failed})
