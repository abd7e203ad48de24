"""The audit of the first forwards of an engine that runs, and the look at where its pool is."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import AttachError, Overlap, StepListener
from canary_core.watchers.audit import running, snapshot


class Engine(ToyEngine):
    """May leave a tensor out of its regions, and store something that no view says."""

    leaves_out = ""
    stray = 0

    def region(self, name="full"):
        region = super().region(name)
        kept = tuple(s for s in region.sources if s.name != self.leaves_out)
        return type(region)(name, region.slots, kept, null_slot=0)

    def forward(self, batch):
        super().forward(batch)
        if self.stray:
            self.k[0][self.stray] += 1.0


def guarded(leaves_out="", **settings) -> Guarded:
    """An engine with a full pool and a window's, whose tensors are named."""
    engine = Engine(window=8)
    engine.leaves_out = leaves_out
    return Guarded(engine, pool_tensors=engine.pool_tensors, **{"audit": 4, **settings})


def serve(guarded: Guarded, forwards: int) -> None:
    """Prefills of two requests, then decodes."""
    guarded.submit("a", 5)
    guarded.submit("b", 3)
    guarded.step()
    for _ in range(forwards - 1):
        guarded.decode()


def test_the_first_forwards_are_audited_and_told_once():
    """So many as the setting says; then nothing is compared any more, and the copy's memory is given back."""
    a = guarded()
    serve(a, 6)
    (event,) = a.findings.told("audit")
    assert event.level == "info"
    assert event.fields["forwards"] == len(a.canary.audit.results) == 4
    assert event.fields["unclaimed_bytes"] == 0
    assert event.fields["compared_bytes"] == 4 * sum(t.nbytes for t in a.engine.pool_tensors().values())
    assert 0 < event.fields["changed_bytes"] == event.fields["claimed_bytes"]
    assert event.fields["snapshot_bytes"] == sum(t.nbytes for t in a.engine.pool_tensors().values())
    assert a.canary.stats()["audited_forwards"] == 4
    assert a.canary.stats()["audit_unclaimed_bytes"] == 0
    assert not a.findings.told("audit_failed")
    assert a.violations == []


def test_fewer_forwards_are_told_at_the_end():
    """An engine that stops early."""
    a = guarded(audit=100)
    serve(a, 2)
    assert not a.findings.told("audit")
    a.canary.close()
    assert [e.fields["forwards"] for e in a.findings.told("audit")] == [2]


def test_a_wrong_adapter_is_told_once_and_the_engine_goes_on():
    """A layer's V is missing: one event, with the tensor's name; guarding goes on."""
    a = guarded("v.1")
    serve(a, 4)
    a.canary.close()
    (event,) = a.findings.told("audit_failed")
    assert (event.level, event.fields["forwards"]) == ("error", 1)
    assert event.fields["unclaimed_bytes"] > 0
    (problem,) = event.fields["problems"]
    assert "of 'v.1' (shape [64, 24])" in problem
    assert not a.findings.told("audit")
    assert not a.findings.told("disabled")
    assert a.canary.stats()["forwards"] == 4


def test_raise_mode_stops_at_the_end_of_that_step():
    """With the same sentences."""
    a = guarded("v.1", mode="raise")
    with pytest.raises(AttachError, match=r"the audit of the first forwards failed: forward 1: .* of 'v\.1'"):
        serve(a, 1)


def test_bytes_that_events_name_may_change_within_a_forward():
    """Slots that arrive by another way: until it is said that they did."""
    a = guarded(audit=3)
    a.canary.slots.expect("full", torch.tensor([40, 41]))
    a.engine.stray = 40
    serve(a, 2)
    a.canary.slots.forget("full", torch.tensor([40]))
    a.decode()
    assert [r.passed for r in a.canary.audit.results] == [True] * 3

    a = guarded(audit=3)
    a.canary.slots.expect("full", torch.tensor([40, 41]))
    a.canary.slots.forget("full", torch.tensor([40]))
    serve(a, 1)
    a.engine.stray = 40
    a.decode()
    assert [r.passed for r in a.canary.audit.results] == [True, False], "once arrived it must stay as it is"


def test_a_forward_without_a_view_is_audited_by_what_its_listeners_forget():
    """They know which slots it may have written."""
    a = guarded(audit=2)
    slots = torch.tensor([9])

    class Forgets(StepListener):
        def forget(self, batch):
            if batch == "told":
                a.canary.slots.forget("full", slots)

    a.canary.step.add(Forgets())

    def forward():
        for tensor in (*a.engine.k, *a.engine.v):
            tensor[slots] += 1.0

    for batch in ("told", "not told"):
        a.canary.step.run(forward, lambda: None, batch=batch, overlap=Overlap.ALL)
    assert [r.passed for r in a.canary.audit.results] == [True, False]
    (problem,) = a.canary.audit.results[1].problems
    assert problem.startswith("the view named no written slot, yet ")


def test_a_forward_that_fails_counts_for_nothing():
    """The next one is audited in its place."""
    a = guarded(audit=1)

    def fail():
        raise RuntimeError("out of memory")

    a.submit()
    with pytest.raises(RuntimeError, match="out of memory"):
        a.canary.step.run(fail, a.engine.batch)
    assert a.canary.audit.results == []
    a.decode()
    assert [r.passed for r in a.canary.audit.results] == [True]


def test_an_audit_that_can_not_be_made_is_told():
    """Nobody names the engine's tensors; or there is no room for a copy. The engine is guarded all the same."""
    a = Guarded(audit=2)
    (event,) = a.findings.told("audit_skipped")
    assert (event.level, event.fields["forwards"]) == ("warning", 0)
    assert "implement PoolAdapter.pool_tensors()" in event.fields["reason"]


def test_a_promised_audit_that_can_not_be_made_is_an_error(monkeypatch):
    """An engine newer than tested: what was not proven, and what to do; guarding goes on. Raise mode stops at attach,
    or at the end of the first step."""
    a = Guarded(untested=True)
    serve(a, 2)
    (event,) = a.findings.told("audit_skipped")
    assert event.level == "error"
    assert "CANARY_UNTESTED=refuse" in event.fields["not_proven"]
    assert a.canary.stats()["forwards"] == 2
    assert not a.findings.told("disabled")
    with pytest.raises(AttachError, match=r"could not be made: nobody says which tensors hold the engine's KV"):
        Guarded(untested=True, mode="raise")
    monkeypatch.setattr(snapshot, "_free_bytes", lambda device: 1000)
    with pytest.raises(AttachError, match=r"could not be made: a snapshot .* only a fourth of free memory"):
        serve(guarded(untested=True, mode="raise"), 1)


def test_a_promised_audit_that_was_made_in_part_is_a_warning(monkeypatch):
    """Forwards that passed before a graph is captured have proven the adapter."""
    a = guarded(untested=True, mode="raise")
    serve(a, 2)
    monkeypatch.setattr(running, "capturing", lambda device: True)
    a.decode()
    (event,) = a.findings.told("audit_skipped")
    assert (event.level, event.fields["forwards"]) == ("warning", 2)


def test_no_room_for_a_copy_is_told(monkeypatch):
    """With how much it takes; the engine is guarded all the same."""
    monkeypatch.setattr(snapshot, "_free_bytes", lambda device: 1000)
    a = guarded()
    serve(a, 3)
    (event,) = a.findings.told("audit_skipped")
    assert "only a fourth of free memory" in event.fields["reason"]
    assert not a.findings.told("disabled")
    assert a.canary.stats()["forwards"] == 3


def test_a_forward_that_is_captured_ends_the_audit(monkeypatch):
    """Nothing may be read there; one event says so."""
    monkeypatch.setattr(running, "capturing", lambda device: True)
    a = guarded()
    serve(a, 2)
    (event,) = a.findings.told("audit_skipped")
    assert "a CUDA graph is captured that holds Canary's own work" in event.fields["reason"]
    assert a.canary.audit.results == []


def test_without_the_setting_nothing_is_audited():
    """Nor told."""
    a = guarded(audit=0)
    serve(a, 2)
    a.canary.close()
    assert not any(a.findings.told(name) for name in ("audit", "audit_failed", "audit_skipped"))
    assert "audited_forwards" not in a.canary.stats()


@pytest.mark.parametrize("audit", [0, 8])
def test_a_pool_that_moves_is_told_and_nothing_is_found_there(audit):
    """The engine replaced the tensors of one region; the adapter describes the old ones, where no write ever comes."""
    a = guarded(audit=audit)
    serve(a, 2)
    a.engine.k = [t.clone() for t in a.engine.k]
    for _ in range(3):
        a.decode()
    a.canary.drain()
    a.decode()
    a.canary.drain()
    (event,) = a.findings.told("pool_moved")
    assert event.level == "error"
    assert event.fields["region"] == "full"
    assert event.fields["sources"] == ["k.0", "k.1"]
    assert "the adapter still describes the old tensors" in event.fields["reason"]
    assert a.violations == []
    assert a.canary.enabled


def test_an_adapter_that_follows_a_pool_that_moves_is_believed_again():
    """It rebinds the region."""
    a = guarded(audit=8)
    serve(a, 2)
    a.engine.k = [t.clone() for t in a.engine.k]
    a.canary.slots.rebind("full", a.engine.region().sources)
    a.decode()
    a.canary.drain()
    assert not a.findings.told("pool_moved")
    assert [r.passed for r in a.canary.audit.results] == [True] * 3
