"""`Watchdog`: makes silence audible. Engines swallow exceptions of plugins, so a hook without any call is reported."""

from collections.abc import Callable

from canary_core.runtime.watch import PERIOD_S, WATCH


class Watchdog:
    """Calls ``alarm`` once, from the watch's thread, unless `feed` is called within ``after_s`` seconds, told to two
    seconds. While the process stands still, as under a debugger or in a virtual machine that is paused, hardly any time
    passes: looks are counted. One that nobody keeps never calls."""

    def __init__(self, after_s: float, alarm: Callable[[], None]) -> None:
        self._alarm = alarm if after_s > 0 else None
        self._looks_left = int(after_s / PERIOD_S) + 1
        if after_s > 0:
            WATCH.add(self)

    def feed(self) -> None:
        """The thing watched for happened."""
        self._alarm = None

    def look(self, now: float) -> None:
        """See `Watch.look`."""
        self._looks_left -= 1
        if self._looks_left <= 0 and (alarm := self._alarm) is not None:
            self._alarm = None
            alarm()
