"""`Watch`: one thread of a process that looks at each guard every few seconds, and reports a blind one."""

import os
import threading
import time
import weakref
from typing import Protocol

PERIOD_S = 2.0
"""Seconds between two looks."""

LATE_S = 30.0
"""Longest time without a look, while the process ran, before the thread counts as dead."""


class Looks(Protocol):
    """Interface of a watched object."""

    def look(self, now: float) -> None:
        """Reports trouble; ``now`` is `time.monotonic`. On the watch's thread: never touches a device."""


class Watch:
    """Calls `Looks.look` of all added objects, as long as somebody keeps them, from one daemon thread that begins with
    the first. The thread goes on after a failing look, see `broken`. A forked process begins anew."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._lock = threading.Lock()
        self._looked_at: weakref.WeakSet[Looks] = weakref.WeakSet()
        self._process: int | None = None
        self.last = 0.0
        """Time of the last look, of `time.monotonic`."""
        self._failing: weakref.WeakSet[Looks] = weakref.WeakSet()
        self._untold: list[Exception] = []
        self._expected: set[threading.Thread] = set()
        self._suspect: tuple[float, float] | None = None

    def add(self, looks: Looks) -> None:
        """``looks`` is looked at from now on."""
        with self._lock:
            self._looked_at.add(looks)
            if self._process == os.getpid():
                return
            self._process, self.last = os.getpid(), time.monotonic()
            self._expected.clear()
        try:
            threading.Thread(target=self._run, name="canary-watch", daemon=True).start()
        except RuntimeError:
            # At the end of a process none can be started, nor is one needed.
            self._process = None

    def discard(self, looks: Looks) -> None:
        """``looks`` is looked at no more."""
        with self._lock:
            self._looked_at.discard(looks)

    def expect(self, thread: threading.Thread) -> None:
        """``thread`` is to run until `release`."""
        with self._lock:
            self._expected.add(thread)

    def release(self, thread: threading.Thread) -> None:
        """``thread`` may end."""
        with self._lock:
            self._expected.discard(thread)

    def died(self) -> list[str]:
        """Names of the threads that ended too early, each once."""
        with self._lock:
            # A thread that is about to be started has no number.
            dead = [thread for thread in self._expected if thread.ident is not None and not thread.is_alive()]
            self._expected.difference_update(dead)
        return [thread.name for thread in dead]

    def broken(self) -> list[Exception]:
        """Exceptions of looks, each once, and again after a good look in between."""
        with self._lock:
            untold, self._untold = self._untold, []
        return untold

    def dead(self, now: float) -> bool:
        """Whether nobody has looked for `LATE_S`, though the process ran: to be asked now and then. A process that
        stood still for a while, as in a debugger, is given some time to look."""
        if self._process != os.getpid() or now - self.last <= LATE_S:
            self._suspect = None
        elif self._suspect is None or self._suspect[0] != self.last:
            self._suspect = (self.last, now)
        else:
            return now - self._suspect[1] > 3 * self._period_s
        return False

    def look(self) -> None:
        """Looks at all of them, once."""
        self.last = now = time.monotonic()
        with self._lock:
            looked_at = list(self._looked_at)
        for looks in looked_at:
            try:
                looks.look(now)
                self._failing.discard(looks)
            except Exception as error:
                with self._lock:
                    if looks not in self._failing:
                        self._untold.append(error)
                    self._failing.add(looks)

    def _run(self) -> None:
        while True:
            time.sleep(self._period_s)
            self.look()


WATCH = Watch()
"""This process's watch."""
