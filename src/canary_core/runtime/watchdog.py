"""`Watchdog`: makes silence audible. Engines swallow the exceptions of plugins, so a hook that never fires is told."""

import threading
from collections.abc import Callable

WAITS = 30
"""Waits that the time is divided into."""


class Watchdog:
    """Calls ``alarm`` once, from a daemon thread, unless `feed` is called within ``after_s`` seconds. While the process
    stands still, as under a debugger or in a virtual machine that is paused, hardly any time passes."""

    def __init__(self, after_s: float, alarm: Callable[[], None]) -> None:
        self._fed: threading.Event | None = None
        if after_s > 0:
            self._fed = threading.Event()
            given = (self._fed, after_s / WAITS, alarm)
            threading.Thread(target=_watch, args=given, name="canary-watchdog", daemon=True).start()

    def feed(self) -> None:
        """The thing watched for happened; further calls cost one comparison."""
        if self._fed is not None:
            self._fed.set()
            self._fed = None


def _watch(fed: threading.Event, wait_s: float, alarm: Callable[[], None]) -> None:
    # A pause ends one wait early, however long it is.
    if not any(fed.wait(wait_s) for _ in range(WAITS)):
        alarm()
