"""What a plugin that works on incidents on a thread of its own can rely on, and what a broken one can't break."""

import time

import pytest
from support.guarded import Guarded

from canary_core import ViolationError, hookimpl


class Works:
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.incidents: list[tuple[object, object]] = []
        self.settled: list[bool] = []

    @hookimpl
    def canary_incident(self, canary, incident):
        self.incidents.append((canary, incident))

    @hookimpl
    def canary_settle(self, canary, last):
        self.settled.append(last)


class Fails:
    """Raises wherever it is called of an incident."""

    @hookimpl
    def canary_incident(self):
        raise RuntimeError("broken plugin")

    @hookimpl
    def canary_settle(self):
        raise RuntimeError("broken plugin")


def broken(*plugins: object, **settings: object) -> Guarded:
    """An engine that reads bytes which were changed behind its back."""
    guarded = Guarded(None, *plugins, read_check=-1, **settings)
    guarded.submit()
    guarded.step()
    guarded.engine.v[1].zero_()
    guarded.decode()
    return guarded


def test_it_is_told_whose_incident_it_is_and_when_to_be_done():
    """The Canary comes with the incident; `Canary.drain` waits, and `Canary.close` says that no more will come."""
    plugin = Works()
    guarded = broken(plugin)
    guarded.canary.drain()
    ((canary, incident),) = plugin.incidents
    assert canary is guarded.canary
    assert incident in guarded.canary.incidents
    assert plugin.settled == [False]
    guarded.canary.close()
    assert plugin.settled[-1] is True


def test_it_is_waited_for_before_a_finding_stops_the_engine():
    """In raise mode the incident that is raised has what the thread worked out: the built-in diagnosis, too."""
    plugin = Works()
    with pytest.raises(ViolationError) as raised:
        broken(plugin, mode="raise")
    assert plugin.settled[:1] == [False]
    assert raised.value.incident.diagnoses


class Slow:
    """Takes its time with an incident, and the look at it has begun."""

    @hookimpl
    def canary_incident(self):
        time.sleep(0.3)


def test_a_diagnosis_follows_its_incident():
    """Though another thread works it out, while plugins are still told of the incident."""
    guarded = broken(Slow())
    guarded.canary.close()
    names = [event.name for event in guarded.findings.events if event.name in ("incident", "diagnosis")]
    assert names == ["incident", "diagnosis"]


def test_one_that_fails_keeps_nobody_from_the_diagnosis():
    """It is told as an error of the plugin, once for each hook; incident, diagnosis and summary come all the same."""
    guarded = broken(Fails())
    guarded.canary.close()
    failed = {event.fields["where"] for event in guarded.findings.told("reporting_failed")}
    assert failed == {"canary_incident", "canary_settle"}
    assert len(guarded.findings.told("diagnosis")) == len(guarded.findings.told("incident")) == 1
    assert guarded.findings.told("summary")
