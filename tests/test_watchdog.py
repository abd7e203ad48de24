"""`Watchdog`: silence is told once, and only where there is silence."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from canary_core.runtime import watchdog
from canary_core.runtime.watch import Watch
from canary_core.runtime.watchdog import Watchdog


@pytest.fixture
def barks(monkeypatch):
    """Alarms that rang so far, on a watch that looks only when told to."""
    monkeypatch.setattr(watchdog, "WATCH", Watch(3600))
    return []


def test_silence_is_told_once_from_a_thread_that_keeps_nobody_alive():
    """The alarm rings in the daemon thread of the watch; what comes later changes nothing."""
    rang, threads = threading.Event(), []

    def alarm() -> None:
        threads.append(threading.current_thread())
        rang.set()

    watched = Watchdog(0.001, alarm)
    assert rang.wait(30)
    watched.feed()
    assert [(thread.name, thread.daemon) for thread in threads] == [("canary-watch", True)]


def test_silence_is_told_once_its_time_has_passed(barks):
    """A look every two seconds: after thirty of them a minute is over, and the next one tells."""
    kept = Watchdog(60.0, lambda: barks.append("silence"))
    for _ in range(30):
        watchdog.WATCH.look()
    assert barks == []
    for _ in range(3):
        watchdog.WATCH.look()
    assert barks == ["silence"]
    kept.feed()


def test_an_alarm_that_fails_is_told(barks):
    """By whoever asks the watch for what failed, as for any look."""
    kept = Watchdog(0.001, lambda: 1 / 0)
    for _ in range(3):
        watchdog.WATCH.look()
    assert [type(error) for error in watchdog.WATCH.broken()] == [ZeroDivisionError]
    kept.feed()


def test_what_is_fed_never_barks(barks):
    """After the first call there is nothing to tell; further ones do nothing."""
    fed = Watchdog(3.0, lambda: barks.append("silence"))
    for _ in range(3):
        fed.feed()
        watchdog.WATCH.look()
    assert barks == []


def test_no_time_is_no_watchdog(barks):
    """Zero seconds turn it off: nothing is looked at, and no thread begins."""
    threads = threading.active_count()
    off = Watchdog(0.0, lambda: barks.append("silence"))
    assert threading.active_count() == threads
    for _ in range(3):
        watchdog.WATCH.look()
    off.feed()
    assert barks == []


def test_all_watchdogs_share_one_thread(monkeypatch):
    """However many engines a process has."""
    monkeypatch.setattr(watchdog, "WATCH", Watch(3600))
    threads = threading.active_count()
    kept = [Watchdog(60.0, lambda: pytest.fail("an alarm")) for _ in range(9)]
    assert len(kept) == 9
    assert threading.active_count() == threads + 1


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
