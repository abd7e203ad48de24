"""`Watchdog`: silence is told once, and only where there is silence."""

import threading

import pytest

from canary_core.runtime.watchdog import Watchdog


def timers() -> set[threading.Thread]:
    """Those that run now."""
    return {thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)}


def test_silence_is_told_once_from_a_thread_that_keeps_nobody_alive():
    """The alarm rings in a daemon thread of its own; what comes later changes nothing."""
    rang, threads = threading.Event(), []

    def alarm() -> None:
        threads.append(threading.current_thread())
        rang.set()

    watchdog = Watchdog(0.001, alarm)
    assert rang.wait(30)
    watchdog.feed()
    assert [thread.daemon for thread in threads] == [True]
    assert threads[0] is not threading.current_thread()


def test_what_is_fed_never_barks():
    """After the first call nothing waits any more; further ones do nothing."""
    before = timers()
    watchdog = Watchdog(60.0, lambda: pytest.fail("an alarm"))
    (timer,) = timers() - before
    for _ in range(3):
        watchdog.feed()
    timer.join(30)
    assert timers() <= before


def test_no_time_is_no_watchdog():
    """Zero seconds turn it off: no thread at all."""
    before = timers()
    Watchdog(0.0, lambda: pytest.fail("an alarm")).feed()
    assert timers() <= before
