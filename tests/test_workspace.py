"""`Switch` and its `Failsafe`: what is ours never reaches the engine in log mode, what is a finding does. `Workspace`:
in off mode and on a CPU."""

import socket
from contextlib import nullcontext

import pytest
import torch
from support.toy import ToyEngine

from canary_core import AttachError, CanaryConfig, Event, Kind, MisuseError, Phase, Violation, ViolationError
from canary_core.plugins import private_hooks
from canary_core.runtime.workspace import Switch, Workspace
from canary_core.testing import Findings

CPU = torch.device("cpu")


class Told:
    """A switch, and what is told of it."""

    def __init__(self, **settings: object) -> None:
        self.findings = Findings()
        untested = settings.pop("untested_engine", False)
        config = CanaryConfig.load(**{"mode": "log", **settings})
        config = config.for_untested_engine() if untested else config
        self.switch = Switch(Workspace.off(config, CPU), private_hooks(self.findings))

    @property
    def events(self) -> list[Event]:
        """All so far."""
        return self.findings.events


@pytest.fixture
def told() -> Told:
    """In log mode."""
    return Told()


def test_an_exception_of_ours_switches_off_loudly(told):
    """The engine goes on behind the context; one event says where it happened, what it was, and whence it came."""
    with told.switch.guard("settle"):
        raise ValueError("no such page")
    (event,) = told.events
    assert (event.name, event.level) == ("disabled", "error")
    assert (event.fields["where"], event.fields["error"]) == ("settle", "ValueError('no such page')")
    assert "test_workspace.py" in event.fields["traceback"]
    assert not told.switch.enabled


def test_what_goes_well_changes_nothing(told):
    """Nothing is told."""
    with told.switch.guard("settle"):
        pass
    assert told.events == []
    assert told.switch.enabled


@pytest.mark.parametrize(
    "error", [ViolationError(Violation(Kind.BYTES, "full", Phase.SCRUB, step=3)), KeyboardInterrupt(), SystemExit(1)]
)
@pytest.mark.parametrize("mode", ["log", "raise"])
def test_findings_and_wishes_to_stop_pass_through(error, mode):
    """They are no mistakes of ours: Canary stays on, and nothing is told."""
    told = Told(mode=mode)
    with pytest.raises(type(error)) as raised, told.switch.guard("end"):
        raise error
    assert raised.value is error
    assert told.events == []
    assert told.switch.enabled


def test_in_raise_mode_an_exception_of_ours_is_raised_as_it_is():
    """A test that was to run guarded must not pass unguarded."""
    told = Told(mode="raise")
    error = ValueError("no such page")
    with pytest.raises(ValueError, match="no such page") as raised, told.switch.guard("settle"):
        raise error
    assert raised.value is error
    assert told.events == []
    assert told.switch.enabled


def test_misuse_is_told_once_each_and_goes_on(told):
    """The same sentence a second time is no news; another one is."""
    for what in ("call step.end", "call step.end", "call step.after"):
        told.switch.misuse(what)
    assert [(e.name, e.level, e.fields["reason"]) for e in told.events] == [
        ("misuse", "error", "call step.end"),
        ("misuse", "error", "call step.after"),
    ]
    assert told.switch.enabled


def test_misuse_is_an_error_in_raise_mode():
    """Each time, with the sentence."""
    told = Told(mode="raise")
    for _ in range(2):
        with pytest.raises(MisuseError, match=r"^call step\.end$"):
            told.switch.misuse("call step.end")
    assert told.events == []


PROBLEMS = ("no slot claims bytes of v.1", "k.0 is claimed twice")


def test_a_failed_audit_switches_off_what_guards_a_newer_engine():
    """Once, with all problems and what to do; the engine goes on."""
    told = Told(untested_engine=True)
    for _ in range(2):
        told.switch.audit_failed(PROBLEMS)
    (event,) = told.events
    assert (event.name, event.level, event.fields["where"]) == ("disabled", "error", "audit")
    for part in ("newer than its plugin was tested with", *PROBLEMS, "install a tested release"):
        assert part in event.fields["error"]
    assert not told.switch.enabled


def test_a_failed_audit_of_a_tested_engine_is_told_by_the_audit_alone(told):
    """An author audits to read about it; Canary goes on."""
    told.switch.audit_failed(PROBLEMS)
    assert told.events == []
    assert told.switch.enabled


@pytest.mark.parametrize("untested", [False, True])
def test_a_failed_audit_is_an_error_in_raise_mode(untested):
    """Whatever the engine."""
    told = Told(mode="raise", untested_engine=untested)
    with pytest.raises(AttachError, match=r"audit .* failed: no slot claims bytes of v\.1; k\.0 is claimed twice"):
        told.switch.audit_failed(PROBLEMS)
    assert told.events == []


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_an_audit_without_problems_changes_nothing(mode):
    """Neither does one after Canary was switched off."""
    told = Told(mode=mode, untested_engine=True)
    told.switch.audit_failed(())
    assert told.switch.enabled
    told.switch.enabled = False
    told.switch.audit_failed(PROBLEMS)
    assert told.events == []


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({"model": "draft", "rank": 2}, {"model": "draft", "replica": 0, "rank": 2}),
        ({"model": "", "replica": 3}, {"replica": 3, "rank": 0}),
    ],
)
def test_events_name_the_place(settings, about):
    """Machine, replica and rank, and the model where it is known; a field of the event's own wins. `Switch.emit` adds
    nothing."""
    told = Told(**settings)
    about = {"host": socket.gethostname(), **about}
    told.switch.tell(Event("stats", fields={"slots": 3}))
    told.switch.tell(Event("stats", fields={"rank": 9, "model": "own"}))
    told.switch.emit(Event("dismissed"))
    assert [e.fields for e in told.events] == [{"slots": 3, **about}, {**about, "rank": 9, "model": "own"}, {}]


def test_off_mode_has_no_memory():
    """Nothing is allocated, and nothing is on."""
    workspace = Workspace.off(CanaryConfig.load(mode="off"), CPU)
    shared = workspace.shared
    assert workspace.states == {}
    assert [t.numel() for t in (shared.counters, shared.clock, shared.ring)] == [0, 0, 0]
    assert not Switch(workspace, private_hooks()).enabled


def test_on_a_cpu_nothing_runs_beside():
    """There is no other stream, so whoever asks for it stays where he is, and nobody waits."""
    workspace = Workspace.allocate(ToyEngine().regions(), CanaryConfig.load())
    assert list(workspace.states) == ["full"]
    assert workspace.side is None
    assert isinstance(workspace.beside(True), nullcontext)
    workspace.join(for_good=True)
