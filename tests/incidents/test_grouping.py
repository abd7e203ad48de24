"""`Incidents`: findings of one cause are one incident, told once; no count is lost."""

from dataclasses import replace

import pytest
from support.guarded import Guarded

from canary_core import Kind, Phase, Violation, ViolationError, hookimpl
from canary_core.guard.reporting.grouping import Incidents
from canary_core.incident import MOST_KEPT
from canary_core.kinds.links import Link
from canary_core.kinds.registry import links

FREED = Violation(Kind.FREED, "full", Phase.PRE_FORWARD, step=9, slot=5, page=1, request="a", freed_by="a")
FLIP = Violation(Kind.BYTES, "full", Phase.SCRUB, step=9, slot=40, page=10, source="k.1", found_value=1)


class Witness:
    """Keeps the incidents it is told, and what each had then."""

    def __init__(self) -> None:
        self.told = []

    @hookimpl
    def canary_incident(self, incident):
        self.told.append((incident.number, incident.root, dict(incident.kinds)))


def test_findings_of_one_slot_are_one_incident():
    """A slot that is freed in use, and what follows of that, in whatever order the ring has them."""
    guarded = Guarded()
    late = replace(FREED, kind=Kind.DOUBLE_ALLOC, phase=Phase.EVENT, step=12, request="b")
    wrong = replace(FREED, kind=Kind.TOKEN, step=13, request="a")
    assert guarded.canary.report([wrong, late, FREED]) == 3
    (incident,) = guarded.canary.incidents
    assert incident.root is FREED
    assert incident.consequences == {Kind.DOUBLE_ALLOC: 1, Kind.TOKEN: 1}
    (event,) = guarded.findings.told("incident")
    assert event.level == "error"
    assert (event.fields["kind"], event.fields["findings"]) == ("freed", 3)
    assert event.fields["consequences"] == {"double_alloc": 1, "token": 1}
    assert (event.fields["slot"], event.fields["slots"], event.fields["requests"]) == (5, 1, ["a", "b"])
    assert guarded.findings.incidents == [incident]


def test_findings_that_share_nothing_are_incidents_of_their_own():
    """Two flips far from each other, and a freed slot, in one read."""
    guarded = Guarded()
    guarded.canary.report([FLIP, FREED, replace(FLIP, slot=80, page=20, found_value=2)])
    assert [i.root.slot for i in guarded.canary.incidents] == [40, 5, 80]
    assert [e.fields["incident"] for e in guarded.findings.told("incident")] == [1, 2, 3]
    assert all("consequences" not in e.fields for e in guarded.findings.told("incident"))


def test_a_finding_beyond_the_pool_is_told_and_nothing_is_read_there():
    """One that a plugin made on the host may name any slot; to read beyond a tensor would end a GPU's process."""
    guarded = Guarded()
    guarded.canary.report([replace(FLIP, slot=1 << 20)])
    (incident,) = guarded.canary.incidents
    guarded.canary.drain()
    assert guarded.findings.told("diagnosis_failed") == []
    assert incident.root.slot == 1 << 20


def test_two_findings_that_a_third_one_joins_are_one_incident():
    """One of slot 5, one of a request, and one of both."""
    guarded = Guarded()
    of_slot = replace(FREED, kind=Kind.DOUBLE_FREE, phase=Phase.EVENT, request=None, freed_by=None, step=8)
    of_request = replace(FREED, kind=Kind.TOKEN, slot=50, page=12)
    guarded.canary.report([of_slot, of_request, FREED])
    (incident,) = guarded.canary.incidents
    assert (incident.number, incident.root, incident.total) == (1, of_slot, 3)


def test_an_incident_that_was_told_grows_quietly():
    """What follows from it in later forwards is counted, and told at level debug; the root stays."""
    guarded = Guarded()
    guarded.canary.report([FREED])
    guarded.canary.report([replace(FREED, slot=6, step=10), replace(FREED, kind=Kind.BYTES, step=4, phase=Phase.SCRUB)])
    (incident,) = guarded.canary.incidents
    assert incident.root is FREED
    assert incident.kinds == {Kind.FREED: 2, Kind.BYTES: 1}
    assert len(guarded.findings.told("incident")) == 1
    (event,) = guarded.findings.told("incident_grew")
    assert event.level == "debug"
    assert (event.fields["new_findings"], event.fields["findings"]) == (2, 3)


def test_a_request_links_for_a_while_only():
    """What the same request reads wrongly a thousand forwards later is another incident."""
    guarded = Guarded()
    wrong = replace(FREED, kind=Kind.TOKEN, freed_by=None)
    guarded.canary.report([wrong, replace(wrong, slot=30, page=7, step=20), replace(wrong, slot=60, page=15, step=999)])
    assert [i.total for i in guarded.canary.incidents] == [2, 1]


def test_bytes_that_were_exchanged_are_one_incident():
    """One slot has what the other one should have."""
    guarded = Guarded()
    one = replace(FLIP, stored_value=7, found_value=8)
    guarded.canary.report([one, replace(one, slot=80, page=20, stored_value=8, found_value=7)])
    guarded.canary.report([replace(one, slot=20, page=5, stored_value=5, found_value=9)])
    assert [i.total for i in guarded.canary.incidents] == [2, 1]


def test_beyond_the_limit_no_count_is_lost():
    """So many incidents a minute have events of their own; one event has the counts of the others, at last at the
    end."""
    witness = Witness()
    guarded = Guarded(None, witness, incident_limit=2)
    guarded.canary.report([replace(FLIP, slot=slot, page=slot // 4, found_value=slot) for slot in range(0, 90, 10)])
    assert [e.fields["slot"] for e in guarded.findings.told("incident")] == [0, 10]
    assert len(witness.told) == 2
    guarded.canary.close()
    (event,) = guarded.findings.told("incidents_limited")
    assert (event.fields["incidents"], event.fields["kinds"], event.fields["limit"]) == (7, {"bytes": 7}, 2)
    (summary,) = guarded.findings.told("summary")
    assert (summary.fields["incidents"], summary.fields["findings"]) == (9, {"bytes": 9})


def test_the_limit_is_for_a_minute(monkeypatch):
    """When it is over, incidents are told again, after the counts of those that were not."""
    now = [100.0]
    monkeypatch.setattr("canary_core.guard.reporting.grouping.time.monotonic", lambda: now[0])
    guarded = Guarded(incident_limit=1)
    for slot in (0, 20, 40):
        guarded.canary.report([replace(FLIP, slot=slot, page=slot // 4, found_value=slot)])
    now[0] += 61
    guarded.canary.report([replace(FLIP, slot=60, page=15, found_value=60)])
    told = [e.name for e in guarded.findings.events if e.name.startswith("incident")]
    assert told == ["incident", "incidents_limited", "incident"]


def test_one_incident_of_very_many_findings_stays_small(monkeypatch):
    """Its findings are counted, and of its links those stay that the newest findings use."""
    monkeypatch.setattr("canary_core.guard.reporting.grouping.MOST_KEYS", 64)
    incidents = Incidents(lambda event: None, 20, lambda incident: None)
    for number in range(2000):
        incidents.add(replace(FLIP, slot=number, page=number // 4, step=9 + number // 100, found_value=number))
        incidents.tell()
    (incident,) = incidents
    assert incident.total == 2000
    assert len(incident.findings) == MOST_KEPT
    assert len(incidents._index) <= 64
    assert sum(map(len, incidents._open.values())) == sum(map(len, incidents._index.values())) == incidents._links <= 64


def test_very_many_incidents_stay_small(monkeypatch):
    """Those that are closed leave nothing behind, and the links of those that are open are bounded together."""
    monkeypatch.setattr("canary_core.guard.reporting.grouping.MOST_KEYS", 200)
    monkeypatch.setattr("canary_core.guard.reporting.grouping.MOST_OPEN", 16)
    incidents = Incidents(lambda event: None, 20, lambda incident: None)
    for number in range(500):
        incidents.add(replace(FLIP, slot=number * 9, page=number * 9, step=number * 2000, found_value=number))
        incidents.tell()
    assert (incidents.total, len(list(incidents))) == (500, 16)
    assert incidents._links == sum(map(len, incidents._index.values())) <= 200
    assert {i for known in incidents._index.values() for i in known} <= set(incidents)


def test_in_raise_mode_the_error_carries_the_incident():
    """Its root, which need not be the first finding of the ring, and all that belongs to it."""
    guarded = Guarded(mode="raise")
    guarded.canary.report([replace(FREED, kind=Kind.TOKEN), FREED, replace(FLIP)])
    with pytest.raises(ViolationError) as raised:
        guarded.canary.step.end()
    assert raised.value.violation is FREED
    assert raised.value.incident.kinds == {Kind.FREED: 1, Kind.TOKEN: 1}
    assert "token 1" in str(raised.value)


def test_a_page_freed_in_use_is_one_incident():
    """In the running toy engine: every finding of the following forwards belongs to it."""
    guarded = Guarded()
    request, other = guarded.submit(tokens=24), guarded.submit("b", tokens=24)
    guarded.canary.slots.alloc("full", _tensor(range(1, 60)))
    guarded.step(8)
    freed = request.slots[:4]
    guarded.canary.slots.free("full", _tensor(freed), guarded.engine.writers.id("a"))
    guarded.step(4)
    guarded.canary.slots.alloc("full", _tensor(freed), guarded.engine.writers.id("b"))
    other.slots += freed
    guarded.engine.free = freed + guarded.engine.free
    for _ in range(3):
        guarded.step(2)
    assert len(guarded.violations) > 8
    (incident,) = guarded.canary.incidents
    assert incident.root.kind is Kind.FREED
    assert incident.total == len(guarded.violations)
    assert guarded.canary.stats()["incidents"] == 1


def test_a_plugin_that_fails_to_hear_of_an_incident_silences_nobody():
    """The event is told, and so is the failure."""

    class Broken:
        @hookimpl
        def canary_incident(self, incident):
            raise RuntimeError("no socket")

    guarded = Guarded(None, Broken())
    guarded.canary.report([FREED])
    assert len(guarded.findings.told("incident")) == 1
    (failed,) = guarded.findings.told("reporting_failed")
    assert failed.fields["where"] == "canary_incident"


def test_one_cause_in_many_requests_is_one_incident():
    """Weights that changed under a kept cache: each parked prefix differs, first in the same layer. Another layer, or
    another way of being wrong, is another incident."""
    guarded = Guarded()
    wrong = Violation(
        Kind.RECOMPUTE, "full", Phase.EVENT, step=9, slot=5, page=1, request="a", source="k.1", layer=1,
        rule="everywhere",
    )  # fmt: skip
    for step, name in enumerate("abc", 20):
        slot = 40 * step
        guarded.canary.report([replace(wrong, step=10 * step, request=name, slot=slot, page=slot // 4, source="v.1")])
    guarded.canary.report([replace(wrong, step=400, request="d", slot=7, page=7, layer=2, source="k.2")])
    guarded.canary.report([replace(wrong, step=500, request="e", slot=9, page=9, rule="input")])
    assert [(i.root.request, i.total) for i in guarded.canary.incidents] == [("a", 3), ("d", 1), ("e", 1)]
    assert [e.fields["layer"] for e in guarded.findings.told("incident")] == [1, 2, 1]


def test_only_so_many_incidents_stay_open(monkeypatch):
    """The one that was quiet for longest takes nothing more."""
    monkeypatch.setattr("canary_core.guard.reporting.grouping.MOST_OPEN", 2)
    guarded = Guarded()
    for slot in (0, 20, 40):
        guarded.canary.report([replace(FLIP, slot=slot, page=slot // 4, found_value=slot)])
    guarded.canary.report([replace(FLIP, slot=0, page=0, source="v.1")])
    assert [(i.root.slot, i.total) for i in guarded.canary.incidents] == [(40, 1), (0, 1)]
    assert guarded.canary.stats()["incidents"] == 4


def test_links_are_the_same_whichever_finding_comes_first():
    """And two findings of any kind may be of one cause."""
    assert all(links(a, b) == links(b, a) for a in Kind for b in Kind)
    assert all(Link.SLOT in links(kind, kind) or Link.STEP in links(kind, kind) for kind in Kind)


def _tensor(slots):
    import torch

    return torch.tensor(list(slots))
