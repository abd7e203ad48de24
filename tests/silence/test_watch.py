"""`Watch`: one thread looks at every guard, and the engine's thread looks at it."""

import gc
import threading
import time

import pytest

from canary_core.runtime import watch as module
from canary_core.runtime.watch import Watch


class Looked:
    """Counts the looks at it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.looks = threading.Semaphore(0)
        self.error = error

    def look(self, now: float) -> None:
        """Raises ``error``, if there is one."""
        self.looks.release()
        if self.error is not None:
            raise self.error


def test_all_are_looked_at_again_and_again_by_one_thread():
    """Also beside one whose look fails: the exception is given out once, and the thread goes on."""
    before = threading.active_count()
    watch, error = Watch(0.001), ValueError("a broken look")
    good, broken = Looked(), Looked(error)
    watch.add(good)
    watch.add(broken)
    for _ in range(3):
        assert good.looks.acquire(timeout=30)
        assert broken.looks.acquire(timeout=30)
    assert watch.broken() == [error]
    assert broken.looks.acquire(timeout=30)
    assert watch.broken() == []
    assert threading.active_count() == before + 1


def test_a_look_that_fails_again_after_it_passed_is_told_again():
    """As long as it fails, one exception stands for all."""
    watch, looked = Watch(3600), Looked(ValueError("a broken look"))
    watch.add(looked)
    for error, told in [(looked.error, 1), (looked.error, 0), (None, 0), (looked.error, 1)]:
        looked.error = error
        watch.look()
        assert len(watch.broken()) == told


def test_nobody_is_kept_alive_and_nobody_is_looked_at_who_left():
    """What is dropped, or taken out, gets no look any more."""
    watch, stays, leaves = Watch(3600), Looked(), Looked()
    for looked in (stays, leaves, Looked()):
        watch.add(looked)
    watch.discard(leaves)
    gc.collect()
    watch.look()
    assert stays.looks.acquire(blocking=False)
    assert not leaves.looks.acquire(blocking=False)


def test_a_thread_that_ends_is_named_once():
    """Unless it was said that it may; one that has not begun is not dead."""
    watch, ended, released, waits = Watch(3600), *(threading.Thread(target=int, name=name) for name in "abc")
    for thread in (ended, released, waits):
        watch.expect(thread)
    for thread in (ended, released):
        thread.start()
        thread.join()
    watch.release(released)
    assert watch.died() == ["a"]
    assert watch.died() == []


def test_a_watch_that_looks_no_more_is_dead(monkeypatch):
    """Its thread was ended by something: seen from outside some time later, and not at once, since a process that stood
    still has not looked either."""
    thread = threading.Thread
    monkeypatch.setattr(module.threading, "Thread", lambda **given: thread(target=int))
    watch, looked = Watch(1.0), Looked()
    watch.add(looked)
    now = time.monotonic()
    assert not watch.dead(now + 20)
    assert not watch.dead(now + 100), "the process may have stood still"
    assert not watch.dead(now + 101)
    assert watch.dead(now + 105)
    watch.look()
    assert not watch.dead(time.monotonic())


def test_a_watch_that_never_began_is_not_dead():
    """No guard, no thread."""
    assert not Watch().dead(time.monotonic() + 1e6)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread")])
def test_where_no_thread_can_be_started_nothing_is_watched(monkeypatch, error):
    """As at the end of a process: no exception, and nobody calls it dead."""

    class Refused(threading.Thread):
        def start(self) -> None:
            raise error

    monkeypatch.setattr(module.threading, "Thread", Refused)
    watch = Watch(1.0)
    watch.add(Looked())
    assert not watch.dead(time.monotonic() + 1e6)
