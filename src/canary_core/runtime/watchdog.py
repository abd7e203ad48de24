"""`Watchdog`: makes silence audible. Engines swallow the exceptions of plugins, so a hook that never fires is told."""

import threading
from collections.abc import Callable


class Watchdog:
    """Calls ``alarm`` once, from a daemon thread, unless `feed` is called within ``after_s`` seconds."""

    def __init__(self, after_s: float, alarm: Callable[[], None]) -> None:
        self._timer: threading.Timer | None = None
        if after_s > 0:
            self._timer = threading.Timer(after_s, alarm)
            self._timer.daemon = True
            self._timer.start()

    def feed(self) -> None:
        """The thing watched for happened; further calls cost one comparison."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
