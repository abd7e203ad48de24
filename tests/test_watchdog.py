"""`Watchdog`: silence is told once, and only where there is silence."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from canary_core.runtime.watchdog import Watchdog


def watchdogs() -> set[threading.Thread]:
    """Those that run now."""
    return {thread for thread in threading.enumerate() if thread.name == "canary-watchdog"}


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
    before = watchdogs()
    watchdog = Watchdog(60.0, lambda: pytest.fail("an alarm"))
    (thread,) = watchdogs() - before
    for _ in range(3):
        watchdog.feed()
    thread.join(30)
    assert watchdogs() <= before


def test_no_time_is_no_watchdog():
    """Zero seconds turn it off: no thread at all."""
    before = watchdogs()
    Watchdog(0.0, lambda: pytest.fail("an alarm")).feed()
    assert watchdogs() <= before


def test_a_process_that_stands_still_is_not_silent():
    """Stopped for four times as long as silence may last, it has its time when it goes on."""
    program = (
        "import sys, threading, time\n"
        "from canary_core.runtime.watchdog import Watchdog\n"
        "rang = threading.Event()\n"
        "watchdog = Watchdog(3.0, rang.set)\n"
        "print('watching', flush=True)\n"
        "sys.stdin.readline()\n"
        "watchdog.feed()\n"
        "print(rang.is_set())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "watching\n"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(12)
        os.kill(child.pid, signal.SIGCONT)
        answer, _ = child.communicate("go on\n", timeout=60)
    assert answer == "False\n"
