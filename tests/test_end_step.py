"""When the host reads what the device has counted."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from support.toy import ToyEngine

from canary_core import Canary, CanaryConfig, Event, Kind, Violation, hookimpl
from canary_core.plugins import Plugins
from canary_core.runtime import scrub


@dataclass
class Guarded:
    """A guarded toy engine whose host reads every fourth step, as on a GPU."""

    violations: list[Violation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = ToyEngine(slots=64)
        manager = Plugins().manager
        manager.unregister(name="reporting")
        manager.register(self)
        config = CanaryConfig(mode="log", silence_s=0, stats_interval=3)
        self.canary = Canary(self.engine.regions(), config, hooks=manager, writers=self.engine.writers)
        self.canary.step._read_interval = 4

    @hookimpl
    def canary_violation(self, violation):
        self.violations.append(violation)

    @hookimpl
    def canary_event(self, event):
        self.events.append(event)

    def step(self, fault: Callable[[], object] | None = None) -> None:
        self.engine.step(self.canary, 2, fault)


def test_an_idle_engine_hears_of_the_last_forward():
    """What the last forwards found is told by the first calls without a forward, not by some forward later on."""
    g = Guarded()
    request = g.engine.submit("a", list(range(5, 25)))
    for _ in range(4):
        g.step()
    g.step(lambda: g.engine.table[0, 1].fill_(request.slots[2]))
    assert g.violations == []
    for _ in range(2):
        g.canary.step.end()
    assert {(v.kind, v.slot) for v in g.violations} >= {(Kind.POSITION, request.slots[2])}


def test_an_idle_engine_is_not_called_silent():
    """However long there is no forward, nothing is said: neither that checks stall, nor the same counters again."""
    g = Guarded()
    g.engine.submit("a", list(range(5, 25)))
    for _ in range(6):
        g.step()
    told = len(g.events)
    for _ in range(500):
        g.canary.step.end()
    assert [e.name for e in g.events[told:]] == []


def test_an_idle_time_is_no_long_step(monkeypatch):
    """A share of the time is one of the forwards' time: after a pause the scrub does no more than before it."""
    now = [0.0]
    monkeypatch.setattr(scrub.time, "perf_counter", lambda: now[0])
    g = Guarded()
    g.engine.submit("a", list(range(5, 45)))
    scrubbed = []
    for step in range(12):
        if step == 6:
            for _ in range(20):
                now[0] += 0.5
                g.canary.step.end()
        now[0] += 0.01
        g.step()
        scrubbed.append(g.canary.step.scrub._pace.scrub_bytes(1))
    assert max(scrubbed[2:]) - min(scrubbed[2:]) <= 1


def test_the_first_forward_is_scrubbed():
    """A graph may be captured before any step has ended: the scrub is in it."""
    assert all(stretch.slots > 0 for stretch in Guarded().canary.step.scrub.stretches)


def test_a_mark_that_finds_no_slot_changes_nothing():
    """Slots that are none, such as those of evicted window entries, are left out of every mark."""
    g = Guarded()
    g.engine.submit("a", list(range(5, 25)))
    g.step()
    state = g.canary.states["full"]
    before = state.records.clone(), state.fingerprints.clone()
    g.canary.slots.forget("full", torch.tensor([-1, 64]))
    assert torch.equal(state.records, before[0])
    assert torch.equal(state.fingerprints, before[1])
