"""Guards of a running engine that go blind: each break is made from outside, in the engine or in the machinery of the
alarm, and is told. The engine serves on, and its answers are the same."""

import dataclasses
import threading
import time
from collections.abc import Callable

import pytest
from canary_toy.hooks import ToyGuard
from canary_toy.toy_engine import Engine

from canary_core import CanaryConfig, CanaryError, hook_manager, hookimpl
from canary_core.guard.reporting import alarm_test
from canary_core.guard.reporting.lookout import Lookout
from canary_core.guard.reporting.readback import ReadBack
from canary_core.ops.torch import compare
from canary_core.records import Kind
from canary_core.runtime.watch import WATCH, Watch
from canary_core.runtime.witness import Witness
from canary_core.testing import Findings
from canary_desk.incidents.investigator import Investigator

PROMPT = list(range(1, 30))


class Served:
    """The toy engine under guard, which serves requests while pretended time goes by."""

    def __init__(self, **settings: object) -> None:
        self.engine = Engine()
        self.told = Findings()
        hook_manager().register(self.told)
        self.guard = ToyGuard(self.engine, CanaryConfig.load(silence_s=0, **settings))
        self.canary = self.guard.canary
        self.ahead = 0.0
        alarm = self.canary._findings.alarm
        step = alarm.step
        alarm.step = lambda now, *given: step(now + self.ahead, *given)

    def serve(self, seconds: int = 60, name: str = "a") -> list[int]:
        """One request, over and over; every forward takes a second for whoever looks, and for the alarm's test."""
        answer: list[int] = []
        for number in range(seconds):
            if not self.engine.step():
                request = self.engine.submit(f"{name}{number}", PROMPT, 8)
                answer = answer or request.answer
                self.engine.step()
            self.ahead += 1
            self.canary._lookout.look(time.monotonic() + self.ahead)
        return self.engine.requests[next(n for n in self.engine.requests if n.startswith(name))].answer

    def serve_until(self, done: Callable[[], object]) -> None:
        """Serves until ``done``: on a busy machine it takes more forwards until a probe was asked for often enough."""
        for _ in range(50):
            if done():
                return
            self.serve(50)
        raise AssertionError("it did not come to that")

    def events(self, name: str) -> list[dict[str, object]]:
        """Fields of those that were told."""
        return [event.fields for event in self.told.events if event.name == name]


@pytest.fixture
def served(monkeypatch):
    """An engine that is guarded, and whose probes are asked for again every twenty forwards."""
    monkeypatch.setattr(alarm_test, "AGAIN_S", 20.0)
    monkeypatch.setattr(alarm_test, "LEAST_S", 0.0)
    monkeypatch.setattr(alarm_test, "MOST_S", 0.0)
    monkeypatch.setattr(WATCH, "look", lambda: None)
    served = Served()
    yield served
    served.guard.close()
    hook_manager().unregister(served.told)


def test_a_guard_that_sees_all_is_silent(served):
    """Every token is guarded, probes come and are swallowed, nothing is told but that."""
    served.serve()
    served.canary.drain()
    stats = served.canary.stats()
    assert stats["guarded_ratio"] == 1
    assert stats["computed_tokens"] == stats["guarded_tokens"] == served.engine.computed_tokens > 50
    assert stats["alarm_tests"] > 2
    assert stats["violations"] == stats["alarm_dead"] == 0
    assert served.told.violations == []
    assert {event.name for event in served.told.events} <= {"attached", "coverage", "control", "stats"}
    assert served.canary.last_alarm_test is not None
    served.guard.close()
    (summary,) = served.events("summary")
    assert summary["warnings"] == []
    assert "100 % of" in summary["summary"]


def test_a_hook_that_is_bypassed_is_told(served):
    """Something of the engine's keeps the function as it was before it was hooked, and calls that from now on: no token
    is checked any more, which the engine's own count of its tokens shows."""
    right = Engine()
    right.submit("a0", PROMPT, 8)
    while right.step():
        pass
    served.serve(30, "before")
    kept = type(served.engine.runner).forward
    served.engine.runner.forward = lambda batch: kept(served.engine.runner, batch)
    assert served.serve(60, "a") == right.requests["a0"].answer
    (told,) = served.events("unguarded_tokens")[:1]
    assert 0 < told["missing_tokens"] < told["computed_tokens"]
    assert "never seen" in told["reason"]
    served.guard.close()
    assert any("never seen" in warning for warning in served.events("summary")[0]["warnings"])


def test_a_scrub_that_compares_nothing_is_told(served, monkeypatch):
    """It goes on listing slots, and no difference is ever reported."""
    served.serve(20)
    passed = served.canary.stats()["alarm_tests"]
    with monkeypatch.context() as broken:
        broken.setattr(compare, "report_bytes", lambda *given: None)
        served.serve_until(lambda: served.events("alarm_dead"))
    (told,) = served.events("alarm_dead")
    assert "no kernel has reported it" in told["reason"]
    assert served.canary.stats()["alarm_dead"] == 1
    served.serve_until(lambda: served.canary.stats()["alarm_dead"] == 0)  # it works again
    assert served.canary.stats()["alarm_tests"] > passed


def test_a_scrub_that_never_runs_is_told(served, monkeypatch):
    """No slot is passed, while a thousand forwards are checked."""
    served.serve(20)
    monkeypatch.setattr(alarm_test, "LEAST_FORWARDS", 100)
    backend = served.canary._workspace.backend
    monkeypatch.setattr(
        served.canary.step.scrub, "_backend", dataclasses.replace(backend, scrub=lambda state, probed: None)
    )
    served.serve_until(lambda: served.events("alarm_dead"))
    (told,) = served.events("alarm_dead")
    assert "no kernel has reported it" in told["reason"]


def test_a_ring_that_is_never_read_is_told(served, monkeypatch):
    """The counters come, and no row."""
    opened = ReadBack._open
    monkeypatch.setattr(ReadBack, "_open", lambda own: dataclasses.replace(opened(own), rows=[]))
    served.serve_until(lambda: served.events("alarm_dead"))
    (told,) = served.events("alarm_dead")
    assert "its row was not read" in told["reason"]


def test_a_thread_of_incidents_that_does_nothing_is_told(served, monkeypatch):
    """It was started and takes no incident."""
    with monkeypatch.context() as broken:
        broken.setattr(Investigator, "_run", lambda own: None)
        served.serve_until(lambda: served.events("alarm_dead"))
    (told,) = served.events("alarm_dead")
    assert "the thread of incidents has not taken it" in told["reason"]
    served.serve_until(lambda: served.canary.stats()["alarm_dead"] == 0)  # another thread takes it


@pytest.mark.parametrize("answer", [True, RuntimeError("broken plugin")])
def test_a_plugin_that_takes_a_probe_and_does_nothing_is_told(served, answer):
    """It says that it would do something about an incident, or fails: then incidents can't be relied on."""

    class Takes:
        @hookimpl
        def canary_probe(self):
            if answer is not True:
                raise answer
            return True

    plugin = Takes()
    hook_manager().register(plugin)
    try:
        served.serve_until(lambda: served.events("alarm_dead"))
    finally:
        hook_manager().unregister(plugin)
    failed = [fields["where"] for fields in served.events("reporting_failed")]
    assert set(failed) == (set() if answer is True else {"canary_probe"})


def test_a_copy_that_never_arrives_is_told_once(served, monkeypatch):
    """Forwards go on, and nothing is read any more. On a CPU there is no copy, so the read pretends to be under way."""
    served.serve(10)
    began = time.monotonic()
    monkeypatch.setattr(ReadBack, "waiting", property(lambda own: (began, 9)))
    monkeypatch.setattr(ReadBack, "collect", lambda own: None)
    served.serve(60)
    (told,) = [fields for fields in served.events("silence") if "has not arrived" in fields["reason"]]
    assert "stands still" in told["reason"]


def test_a_thread_that_died_is_told(served):
    """One that was expected to run as long as the process."""
    thread = threading.Thread(target=int, name="canary-something")
    WATCH.expect(thread)
    thread.start()
    thread.join()
    served.serve(3)
    (told,) = served.events("silence")
    assert told["thread"] == "canary-something"


def test_a_watch_that_died_is_told_by_the_engines_thread(served, monkeypatch):
    """Forwards go on, and nobody looks."""
    monkeypatch.setattr(WATCH, "dead", lambda now: True)
    served.serve(10)
    (told,) = served.events("silence")
    assert told["thread"] == "canary-watch"


@pytest.mark.parametrize("broken", [Witness, Lookout])
def test_a_look_that_fails_is_told_once(served, monkeypatch, broken):
    """One of the things looked at can't be asked: the others are asked all the same, and the next look tells, or the
    engine's thread, where nothing can be looked at. It is told again where it fails again after it went well."""
    served.engine.submit("a", PROMPT, 100)
    asked = []
    monkeypatch.setattr(type(served.canary._findings.alarm), "look", lambda own, now: asked.append(now))

    def serve() -> None:
        for _ in range(5):
            Watch.look(WATCH)
            served.engine.step()

    for told in (1, 2):
        with monkeypatch.context() as breaks:
            breaks.setattr(broken, "look", lambda own, now: 1 / 0)
            serve()
        events = served.events("silence")
        assert [event["error"] for event in events] == ["ZeroDivisionError: division by zero"] * told
        assert bool(asked) == (broken is Witness or told == 2)
        serve()
    assert served.canary.enabled


def test_what_passes_by_a_pause_is_known(served):
    """Nothing is missing: the tokens are counted as paused."""
    served.serve(30)
    served.canary.step.pause()
    served.serve(30)
    served.canary.step.resume()
    served.serve(60)
    assert served.events("unguarded_tokens") == []
    stats = served.canary.stats()
    assert stats["unguarded_paused_tokens"] > 20
    assert stats["guarded_ratio"] < 1


def test_a_probe_hides_no_corruption(served):
    """Bytes of a slot that a probe may be taken of change: they are told as ever."""
    request = served.engine.submit("a", PROMPT, 100)
    for _ in range(20):
        served.engine.step()
    served.engine.pool.layers[0][0, request.pages[0]] += 1
    for _ in range(60):
        served.engine.step()
    served.canary.drain()
    assert {violation.kind for violation in served.told.violations} == {Kind.BYTES}
    assert {violation.slot for violation in served.told.violations} == {4 * request.pages[0] + i for i in range(4)}


def test_a_dead_alarm_stops_a_test(monkeypatch):
    """In raise mode nothing is left to luck: the next forward ends with the sentence."""
    monkeypatch.setattr(alarm_test, "AGAIN_S", 20.0)
    monkeypatch.setattr(WATCH, "look", lambda: None)
    served = Served(mode="raise")
    monkeypatch.setattr(compare, "report_bytes", lambda *given: None)
    with pytest.raises(CanaryError, match=r"the alarm is dead: a probe .*no kernel has reported it"):
        served.serve_until(lambda: False)
    hook_manager().unregister(served.told)
    served.guard.close()


@pytest.mark.parametrize("settings", [{"scrub_budget": "0"}, {"bytes": "off"}])
def test_without_a_scrub_there_is_no_probe(monkeypatch, settings):
    """Nothing is asked for, and nothing is called dead."""
    monkeypatch.setattr(WATCH, "look", lambda: None)
    served = Served(**settings)
    served.serve(60)
    assert served.events("alarm_dead") == []
    assert served.canary.stats().get("alarm_tests", 0) == 0
    served.guard.close()
    hook_manager().unregister(served.told)
