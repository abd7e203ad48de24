"""`reporting.findings`: each finding is told once, whatever plugins do; what the ring has becomes a `Violation`."""

import time
from dataclasses import replace

import pytest
import torch
from support.guarded import Guarded

from canary_core import Event, Kind, Phase, State, Violation, ViolationError, hookimpl
from canary_core.guard.reporting.budget import BURST_S, OWED_S, PROCESS, SHARE
from canary_core.records import KIND_ROWS, ROW_WORDS, STATES, Counter, Row

FLIP = Violation(Kind.BYTES, "full", Phase.SCRUB, step=9, slot=5, source="k.1", step_written=2, found_value=77)
"""A finding of a host's own check."""


class Vet:
    """Dismisses everything."""

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str:
        return "the engine explains it"


class Broken:
    """Raises in the hooks of these names."""

    def __init__(self, *hooks: str) -> None:
        self.hooks = hooks

    def _raise(self, hook: str) -> None:
        if hook in self.hooks:
            raise RuntimeError(f"no socket for {hook}")

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> None:
        self._raise("canary_dismiss")

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        self._raise("canary_violation")

    @hookimpl
    def canary_event(self, event: Event) -> None:
        self._raise("canary_event")


def test_a_fault_that_stays_is_told_once():
    """However many forwards find it again; what the next write brings is told anew."""
    guarded = Guarded(read_check=-1)
    request = guarded.submit(tokens=12)
    guarded.step(4)
    guarded.engine.k[1][request.slots[2]] += 1
    for _ in range(3):
        guarded.step(2)
    assert [(v.kind, v.slot, v.source) for v in guarded.violations] == [(Kind.BYTES, request.slots[2], "k.1")]
    stats = guarded.canary.stats()
    assert (stats["violations"], stats["bytes"]) == (1, 1)
    assert stats["repeated"] >= 2


@pytest.mark.parametrize(
    ("other", "news"),
    [
        ({}, False),
        ({"step": 10}, False),
        ({"request": "b", "position": 3}, False),
        ({"slot": 6}, True),
        ({"region": "window"}, True),
        ({"source": "v.1"}, True),
        ({"found_value": 78}, True),
        ({"step_written": 3}, True),
    ],
)
def test_what_counts_as_the_same_flip(guarded, other, news):
    """The same bytes of the same write, whoever reads them and whenever."""
    assert guarded.canary.report([FLIP]) == 1
    assert guarded.canary.report([replace(FLIP, **other)]) == news
    assert len(guarded.violations) == 1 + news
    assert guarded.canary.stats()["repeated"] == 1 - news


@pytest.mark.parametrize("other", [{"request": "b"}, {"position": 3}])
def test_a_wrong_mapping_is_each_readers_own(guarded, other):
    """One slot read wrongly at two places is two findings."""
    wrong = replace(FLIP, kind=Kind.TOKEN, source=None, found_value=None, request="a", position=2)
    assert guarded.canary.report([wrong, wrong, replace(wrong, **other)]) == 2


@pytest.mark.parametrize("other", [{"rule": "window_slot"}, {"node": 8}, {"detail": "its child is older"}])
def test_a_cache_may_be_broken_in_several_ways(guarded, other):
    """Rule, node and what exactly tell structures' findings from each other."""
    broken = Violation(Kind.CACHE_STRUCTURE, "full", Phase.SWEEP, step=1, node=7, rule="slot_free", detail="it is free")
    assert guarded.canary.report([broken, replace(broken, step=2), replace(broken, **other)]) == 2


def test_only_so_many_findings_are_remembered(monkeypatch, guarded):
    """The one that was seen longest ago is forgotten first, and told again."""
    monkeypatch.setattr("canary_core.guard.reporting.known.REMEMBERED", 2)
    first, second, third = (replace(FLIP, slot=slot) for slot in (1, 2, 3))
    assert guarded.canary.report([first, second, first, third]) == 3
    assert guarded.canary.report([first]) == 0
    assert guarded.canary.report([second]) == 1


@pytest.mark.parametrize("dismissed", [False, True])
def test_a_finding_reaches_plugins_unless_one_dismisses_it(dismissed):
    """With a reason it becomes a ``dismissed`` event for those who debug, and is counted; else a violation."""
    guarded = Guarded(None, *([Vet()] if dismissed else []), read_check=-1)
    request = guarded.submit(tokens=8)
    guarded.step(4)
    guarded.engine.k[1][request.slots[2]] += 1
    guarded.step(4)
    guarded.canary.drain()
    told = guarded.findings.told("dismissed")
    if dismissed:
        (event,) = told
        assert (event.level, event.fields["source"]) == ("debug", "k.1")
        assert event.fields["reason"] == "the engine explains it"
        assert guarded.violations == []
    else:
        assert told == []
        assert [v.source for v in guarded.violations] == ["k.1"]
    stats = guarded.canary.stats()
    assert (stats["violations"], stats["dismissed"]) == (int(not dismissed), int(dismissed))


def test_a_dismissed_finding_stops_nobody():
    """Neither raised nor counted as a finding in raise mode."""
    guarded = Guarded(None, Vet(), mode="raise")
    assert guarded.canary.report([FLIP]) == 0
    guarded.canary.step.end()
    assert guarded.canary.stats()["violations"] == 0


@pytest.mark.parametrize("hook", ["canary_dismiss", "canary_violation"])
def test_a_plugin_that_fails_to_answer_silences_nobody(hook, logs):
    """The finding stands and is reported, and so is the failure; Canary stays on."""
    guarded = Guarded(None, Broken(hook))
    assert guarded.canary.report([FLIP]) == 1
    assert guarded.violations == [FLIP]
    assert [e["source"] for e in logs if e["event"] == "violation"] == ["k.1"]
    (failed,) = guarded.findings.told("reporting_failed")
    assert (failed.level, failed.fields["where"]) == ("error", hook)
    assert f"no socket for {hook}" in failed.fields["error"]
    assert guarded.canary.enabled
    assert guarded.canary.stats()["violations"] == 1


def test_a_plugin_that_fails_at_everything_stops_nothing(logs):
    """Not even its failure to hear of its failure gets out; built-in reporting has both."""
    guarded = Guarded(None, Broken("canary_violation", "canary_event"))
    assert guarded.canary.report([FLIP]) == 1
    assert {"violation", "reporting_failed"} <= {e["event"] for e in logs}
    assert guarded.canary.enabled


def test_in_raise_mode_the_first_finding_is_raised_once():
    """Of those that were not raised yet; the rest is told all the same."""
    guarded = Guarded(mode="raise")
    flips = [replace(FLIP, slot=slot) for slot in (3, 4)]
    assert guarded.canary.report(flips) == 2
    with pytest.raises(ViolationError) as raised:
        guarded.canary.step.end()
    assert raised.value.violation is flips[0]
    guarded.canary.step.end()
    assert guarded.violations == flips


def row(**words: int) -> list[int]:
    """As the ring has them: -1 where a finding doesn't say."""
    made = [-1] * ROW_WORDS
    for name, value in {"SEQUENCE": 1, "REGION": 0, **words}.items():
        made[Row[name]] = value
    return made


def test_a_row_of_bytes_names_layer_writer_and_values(guarded):
    """Step and phase share a word; a page is counted in the region's own pages."""
    writer = guarded.engine.writers.id("a")
    found = guarded.canary.decode(
        row(
            KIND=Kind.BYTES, STEP=12 * 8 + Phase.SCRUB, SLOT=9, SOURCE=3, STORED_POSITION=40 * STATES + State.WRITTEN,
            STORED_TOKEN=17, STORED_VALUE=5, FOUND_VALUE=6, STORED_WRITER=writer, STEP_WRITTEN=11,
        )
    )  # fmt: skip
    assert found == Violation(
        Kind.BYTES, "full", Phase.SCRUB, step=12, slot=9, page=9, source="v.1", layer=1, half="v",
        stored_state=State.WRITTEN, stored_position=40, stored_token=17, stored_value=5, found_value=6,
        stored_request="a", step_written=11,
    )  # fmt: skip


def test_a_row_of_a_freed_slot_names_who_freed_it_and_when(guarded):
    """Both are in one word."""
    reader, thief = (guarded.engine.writers.id(name) for name in ("reader", "thief"))
    found = guarded.canary.decode(
        row(
            KIND=Kind.FREED, STEP=2 * 8 + Phase.PRE_FORWARD, SLOT=1, POSITION=0, TOKEN=5, WRITER=reader,
            STORED_POSITION=int(State.FREED | State.WRITTEN), STORED_TOKEN=5, STORED_VALUE=3, FREED=thief << 32 | 1,
        )
    )  # fmt: skip
    assert (found.request, found.freed_by, found.step_freed) == ("reader", "thief", 1)
    assert (found.stored_state, found.position, found.token) == (State.FREED, 0, 5)
    assert (found.source, found.found_value) == (None, None)


def test_what_a_row_does_not_say_is_not_known(guarded):
    """None, never -1."""
    found = guarded.canary.decode(row(KIND=Kind.SLOT_RANGE, STEP=8 + Phase.PRE_FORWARD, SLOT=999, POSITION=4))
    assert found == Violation(Kind.SLOT_RANGE, "full", Phase.PRE_FORWARD, step=1, slot=999, page=999, position=4)


def test_more_findings_than_the_ring_has_rows_are_told_as_dropped():
    """The counts are complete, and one event says how many rows are missing: all but the first of the kind."""
    guarded = Guarded(ring_rows=2)
    guarded.canary.slots.free("full", torch.arange(10, 30))
    guarded.canary.slots.settle()
    guarded.canary.slots.free("full", torch.arange(10, 30))
    guarded.canary.drain()
    assert [v.kind for v in guarded.violations] == [Kind.DOUBLE_FREE] * KIND_ROWS
    (event,) = guarded.findings.told("rows_dropped")
    assert event.level == "warning"
    assert (event.fields["rows"], event.fields["ring_rows"]) == (20 - KIND_ROWS, 2)
    counters = guarded.canary.states["full"].shared.counters
    assert int(counters[Kind.DOUBLE_FREE]) == int(counters[Counter.ROWS]) == 20


def test_a_storm_of_one_kind_hides_no_other(monkeypatch):
    """Each forward finds the same changed bytes again, more than the ring has rows; then a store of another request is
    lost."""
    guarded = Guarded(read_check=-1, ring_rows=2)
    engine, damaged, other = guarded.engine, guarded.submit(tokens=40), guarded.submit("b")
    guarded.step(40)
    engine.k[1][damaged.slots[:30]] += 1
    for _ in range(3):
        guarded.decode()
    assert {v.kind for v in guarded.violations} == {Kind.BYTES}
    right = engine.forward

    def loses(batch):
        before = engine.v[1].clone()
        right(batch)
        engine.v[1][other.slots[-1]] = before[other.slots[-1]]

    monkeypatch.setattr(engine, "forward", loses)
    guarded.decode()
    assert guarded.canary.stats()["rows_dropped"] > 0
    found = [(v.kind, v.source, v.slot) for v in guarded.violations if v.kind is not Kind.BYTES]
    assert found == [(Kind.LOST_WRITE, "v.1", other.slots[-1])]


@pytest.fixture
def clock(monkeypatch):
    """Time as counts that wait see it."""
    now = [100.0]
    monkeypatch.setattr("canary_core.runtime.telling.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def budget(monkeypatch):
    """The process's, as much as a test puts in: telling costs nothing by itself."""
    monkeypatch.setattr(PROCESS, "left", BURST_S)
    monkeypatch.setattr(PROCESS, "refill", lambda: None)
    monkeypatch.setattr(PROCESS, "spend", lambda seconds: None)
    for name in ("FIRST", "FEW"):
        monkeypatch.setattr(f"canary_core.guard.reporting.budget.{name}", 0)
    return PROCESS


def test_a_flood_is_told_up_to_a_budget_and_counted_beyond_it(budget):
    """What was counted only is told when it is found again and there is room; a repetition costs nothing."""
    guarded = Guarded()
    flips = [replace(FLIP, slot=slot) for slot in range(10, 15)]
    assert guarded.canary.report(flips[:3]) == 3
    budget.left = 0
    assert guarded.canary.report(flips) == 0
    assert (guarded.canary.left_out["findings_limited"], guarded.canary.stats()["repeated"]) == (2, 3)
    budget.left = 1
    assert guarded.canary.report(flips) == 2
    assert guarded.canary.stats()["violations"] == 5


def test_rows_beyond_the_budget_are_not_decoded(monkeypatch, budget):
    """Neither are repetitions: of ten rows of the ring two are told, and of the same ten again none. Where too much is
    owed they are counted without a look."""
    guarded = Guarded()
    reporter = guarded.canary._findings
    decoded, decode = [], reporter.decode

    def decodes(row):
        decoded.append(row)
        if len(decoded) == 2:
            budget.left = 0
        return decode(row)

    monkeypatch.setattr(reporter, "decode", decodes)
    for _ in range(2):
        guarded.canary.slots.free("full", torch.arange(10, 20))
        guarded.canary.slots.settle()
    guarded.canary.drain()
    assert (len(guarded.violations), len(decoded)) == (2, 2)
    (event,) = guarded.findings.told("findings_limited")
    assert (event.fields["findings"], event.fields["kinds"]) == (8, {"double_free": 8})
    rows = [[*row] for row in decoded]
    for left, repeated, limited in ((0, 2, 8), (-OWED_S, 2, 10)):
        budget.left = left
        assert list(reporter._decoded(rows)) == []
        assert (guarded.canary.stats()["repeated"], len(decoded)) == (repeated, 2)
        assert guarded.canary.left_out["findings_limited"] == limited


def test_the_first_findings_are_told_whatever_is_left(budget, monkeypatch):
    """Of a Canary, of a kind, in a source, and of a request: so a second incident is told beside a flood of another."""
    monkeypatch.setattr("canary_core.guard.reporting.budget.FIRST", 3)
    monkeypatch.setattr("canary_core.guard.reporting.budget.FEW", 1)
    budget.left = -OWED_S
    guarded = Guarded()
    flips = [replace(FLIP, slot=slot, stored_request="a") for slot in range(10, 20)]
    assert guarded.canary.report(flips) == 3
    others = ({"source": "v.0"}, {"stored_request": "b"}, {"kind": Kind.FREED, "source": None})
    for number, other in enumerate(others):
        assert guarded.canary.report([replace(FLIP, **{"slot": 20, "stored_request": "a", **other})]) == 1
        again = [replace(FLIP, **{"slot": 30 + number, "stored_request": "a", **other})]
        assert guarded.canary.report(again) == 0
    rows = [row(KIND=Kind.BYTES, STEP=17, SLOT=slot, SOURCE=source) for source in (0, 1) for slot in range(4)]
    assert [found.source for found, _ in guarded.canary._findings._decoded(rows)] == ["k.0", "v.0"]


def test_the_budget_is_a_share_of_the_time_and_the_process_s(monkeypatch):
    """What telling takes is spent, from one Canary to the next; it comes back by the clock, up to the burst."""
    now, cpu = [100.0], [0.0]
    monkeypatch.setattr("canary_core.guard.reporting.budget.time.monotonic", lambda: now[0])
    monkeypatch.setattr("canary_core.guard.reporting.findings.time.thread_time", lambda: cpu[0])
    for name in ("FIRST", "FEW"):
        monkeypatch.setattr(f"canary_core.guard.reporting.budget.{name}", 0)
    PROCESS.fill()

    class Slow:
        @hookimpl
        def canary_violation(self, violation):
            cpu[0] += BURST_S / 7.5

    numbers = []
    for _ in range(3):
        guarded = Guarded(None, Slow())
        numbers.append(guarded.canary.report([replace(FLIP, slot=slot) for slot in range(10, 30)]))
    assert numbers == [8, 0, 0]
    now[0] += BURST_S / SHARE / 2
    assert guarded.canary.report([replace(FLIP, slot=slot) for slot in range(10, 30)]) == 4
    now[0] += 10 * BURST_S / SHARE
    assert guarded.canary.report([replace(FLIP, slot=slot) for slot in range(30, 60)]) == 8


@pytest.mark.parametrize(
    "kind", [Kind.BYTES, Kind.TOKEN, Kind.PREFIX, Kind.LOST_WRITE, Kind.FREED, Kind.SLOT_RANGE, Kind.WRITE_SLOT]
)
def test_a_row_and_its_finding_are_remembered_alike(guarded, kind):
    """So a row that repeats is known before it is decoded."""
    writer = guarded.engine.writers.id("a")
    for fields in (
        {"STEP": 17, "SLOT": 3, "POSITION": 2, "WRITER": writer, "STORED_POSITION": 65, "STEP_WRITTEN": 1},
        {"STEP": 17, "SLOT": 3, "FOUND_VALUE": 77, "STORED_VALUE": 5, "SOURCE": 1},
    ):
        one = row(KIND=kind, **fields)
        reporter = guarded.canary._findings
        reporter.take([reporter.decode(one)])
        assert reporter.known.repeats(reporter._row_key(one))


def test_what_is_counted_is_told_by_the_watch_once_a_minute_while_the_engine_idles(clock):
    """Dropped rows, and incidents beyond the limit: the first at the next look, later ones together."""
    guarded = Guarded(ring_rows=2, incident_limit=1)
    look = guarded.canary._lookout.look
    reporter = guarded.canary._findings
    for seconds in (0, 10, 20, 61):
        clock[0] = 100.0 + seconds
        reporter.dropped.add(number=5)
        guarded.canary.report([replace(FLIP, slot=slot, found_value=slot) for slot in (1000 + seconds, 3000 + seconds)])
        look(clock[0])
    assert [e.fields["rows"] for e in guarded.findings.told("rows_dropped")] == [5, 15]
    limited = guarded.findings.told("incidents_limited")
    assert [e.fields["incidents"] for e in limited] == [1, 4]
    guarded.canary.close()
    limited = guarded.findings.told("incidents_limited")
    assert sum(e.fields["incidents"] for e in limited) + len(guarded.findings.told("incident")) == 8
    assert guarded.canary.left_out["rows_dropped"] == 20


def test_forwards_that_no_check_sees_are_told(monkeypatch, guarded):
    """The host issues forwards and the device's counters stand still, as where a graph was captured without Canary:
    told once, until a check runs again."""
    monkeypatch.setattr("canary_core.guard.reporting.findings.STALLED_READS", 3)
    guarded.submit(tokens=40)
    guarded.step(1)
    counters = guarded.canary.states["full"].shared.counters

    def replay() -> None:
        """A forward whose check does not run."""
        checked = counters[Counter.CHECKED_FORWARDS].clone()
        view = guarded.engine.batch(chunk=1)
        guarded.canary.step.before(view)
        guarded.engine.forward(view)
        guarded.canary.step.after()
        counters[Counter.CHECKED_FORWARDS] = checked
        guarded.canary.step.end()

    for told in (0, 0, 1, 1, 1):
        replay()
        assert len(guarded.findings.told("silence")) == told
    (event,) = guarded.findings.told("silence")
    assert event.level == "error"
    assert "captured without Canary" in event.fields["reason"]
    guarded.step(1)
    for _ in range(3):
        replay()
    assert len(guarded.findings.told("silence")) == 2


def test_a_canary_that_is_never_called_is_told():
    """Nobody calls it for as long as the settings allow."""
    guarded = Guarded(silence_s=0.01)
    deadline = time.monotonic() + 30
    while not guarded.findings.told("silence") and time.monotonic() < deadline:
        time.sleep(0.01)
    (event,) = guarded.findings.told("silence")
    assert event.level == "error"
    assert event.fields["reason"].startswith("attached 0.01 s ago and no forward was checked")


@pytest.mark.parametrize("end", ["step", "close"])
def test_nobody_waits_for_a_canary_that_was_called_or_closed(end):
    """Nothing is told of it later on."""
    guarded = Guarded(silence_s=60)
    guarded.submit()
    guarded.step() if end == "step" else guarded.canary.close()
    for second in range(60):
        guarded.canary.step.watchdog.look(second)
    assert guarded.findings.told("silence") == []
