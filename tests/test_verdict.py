"""`Verdict` and the hook of those who act: what may not be served, told at once, as often as it is found."""

import pytest
from support.guarded import Guarded

from canary_core import CanaryConfig, ConfigError, Kind, Phase, Verdict, Violation, hookimpl
from canary_core.guard.reporting import budget
from canary_core.verdict import MISLED, MISPLACED, SPOILED

OF_NO_REQUEST = {
    Kind.DOUBLE_FREE, Kind.DOUBLE_ALLOC, Kind.WRITE_AFTER_FREE, Kind.CACHE_STRUCTURE, Kind.EVICTED_IN_USE, Kind.WEIGHTS,
    Kind.RANKS,
}  # fmt: skip


class Acting:
    """Collects verdicts; ``fails``: and raises."""

    def __init__(self, fails: bool = False) -> None:
        self.verdicts: list[Verdict] = []
        self.fails = fails

    @hookimpl
    def canary_verdict(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        if self.fails:
            raise RuntimeError("no scheduler")


class Vet:
    """Dismisses everything."""

    @hookimpl
    def canary_dismiss(self, violation: Violation) -> str:
        return "the engine explains it"


def finding(kind: Kind = Kind.BYTES, phase: Phase = Phase.SCRUB, **more: object) -> Violation:
    """A finding of a host's own check."""
    given = {"step": 9, "slot": 5, "position": 2, "request": "a", **more}
    return Violation(kind, "full", phase, **given)  # type: ignore[arg-type]


def damaged(*plugins: object, **settings: object) -> Guarded:
    """A toy engine, a slot of which has changed, and which reads it three times."""
    guarded = Guarded(None, *plugins, read_check=-1, **settings)
    request = guarded.submit(tokens=12)
    guarded.step(4)
    guarded.engine.k[1][request.slots[2]] += 1
    for _ in range(3):
        guarded.step(2)
    return guarded


def test_every_kind_is_judged_or_is_one_of_the_allocator_of_weights_or_of_ranks():
    """A new kind has to be put somewhere."""
    assert set(Kind) == SPOILED | MISPLACED | MISLED | OF_NO_REQUEST
    assert not SPOILED & MISPLACED
    assert not MISLED & (SPOILED | MISPLACED)
    config = CanaryConfig.load(on_violation="protect")
    judged = {kind for kind in Kind if Verdict.of(finding(kind), config) is not None}
    assert judged == SPOILED | MISPLACED | MISLED


def test_nobody_is_called_in_report_mode():
    """The default: a finding costs what it did."""
    acting = Acting()
    guarded = damaged(acting)
    assert len(guarded.violations) == 1
    assert acting.verdicts == []


def test_a_verdict_comes_as_often_as_the_slot_is_found_to_be_wrong():
    """The finding is told once; each forward that reads it again is a reason to act again."""
    acting = Acting()
    guarded = damaged(acting, on_violation="protect")
    assert len(guarded.violations) == 1
    assert len(acting.verdicts) == 3
    (verdict, *_) = acting.verdicts
    assert (verdict.slot, verdict.spoiled, verdict.stands) == (guarded.violations[0].slot, True, False)


def test_a_dismissed_finding_has_no_verdict():
    """Neither at first nor when it is repeated."""
    acting = Acting()
    guarded = damaged(acting, Vet(), on_violation="protect")
    assert guarded.canary.stats()["dismissed"] == 1
    assert acting.verdicts == []


def test_a_finding_that_the_limit_leaves_out_has_a_verdict(monkeypatch):
    """A storm: nothing is told any more, and all of it is acted on."""
    monkeypatch.setattr(budget.Firsts, "among", lambda *_: False)
    monkeypatch.setattr(budget.PROCESS, "left", 0.0)
    monkeypatch.setattr(budget.PROCESS, "refill", lambda: None)
    acting = Acting()
    guarded = damaged(acting, on_violation="protect")
    assert guarded.violations == []
    assert len(acting.verdicts) == 3


def test_findings_without_room_in_the_ring_put_all_kv_in_doubt():
    """Nobody knows which slots they were of."""
    acting = Acting()
    guarded = Guarded(None, acting, read_check=-1, on_violation="protect", ring_rows=2)
    request = guarded.submit(tokens=24)
    guarded.step(20)
    for slot in request.slots[:12]:
        guarded.engine.k[1][slot] += 1
    guarded.step(2)
    assert guarded.canary.stats()["rows_dropped"] > 0
    assert any(verdict.finding is None and verdict.spoiled for verdict in acting.verdicts)


def test_one_who_acts_and_fails_is_told_and_the_engine_goes_on():
    """The finding is told all the same."""
    acting = Acting(fails=True)
    guarded = damaged(acting, on_violation="protect")
    assert len(guarded.violations) == 1
    told = [event.fields["where"] for event in guarded.findings.told("reporting_failed")]
    assert set(told) == {"canary_verdict"}


@pytest.mark.parametrize(
    ("kind", "phase", "settings", "stands"),
    [
        (Kind.BYTES, Phase.SCRUB, {}, False),
        (Kind.BYTES, Phase.EVENT, {}, False),
        (Kind.BYTES, Phase.PRE_FORWARD, {"read_check": -1}, False),
        (Kind.BYTES, Phase.PRE_FORWARD, {"read_check": 64}, False),
        (Kind.PREFIX, Phase.PRE_FORWARD, {}, True),
        (Kind.PREFIX, Phase.PRE_FORWARD, {"check_budget": 64}, False),
        (Kind.LOST_WRITE, Phase.POST_FORWARD, {}, True),
        (Kind.ARRIVAL, Phase.EVENT, {}, True),
        (Kind.READ_TABLE, Phase.PRE_FORWARD, {}, False),
    ],
)
def test_what_was_given_out_before_stands_where_no_forward_before_can_have_read_it(kind, phase, settings, stands):
    """Bytes that are found to have changed may have changed within the forward before, after they were compared and
    before attention read them."""
    verdict = Verdict.of(finding(kind, phase), CanaryConfig.load(on_violation="protect", **settings))
    assert verdict is not None
    assert verdict.stands is stands


def test_a_verdict_that_comes_late_lets_no_token_stand():
    """On a GPU the host reads findings steps later: tokens may have been given out since."""
    config, lost = CanaryConfig.load(on_violation="protect"), finding(Kind.LOST_WRITE, Phase.POST_FORWARD)
    verdicts = [Verdict.of(lost, config, late) for late in (False, True)]
    assert [verdict is not None and verdict.stands for verdict in verdicts] == [True, False]


def test_protect_compares_hits_and_reads_every_forward_unless_told_otherwise(monkeypatch):
    """As a profile does: what is set by itself wins."""
    config = CanaryConfig.load(on_violation="protect")
    assert (config.hit_check, config.read_interval) == (True, 1)
    assert not CanaryConfig.load().hit_check
    monkeypatch.setenv("CANARY_ON_VIOLATION", "protect")
    monkeypatch.setenv("CANARY_HIT_CHECK", "false")
    assert (CanaryConfig.load().hit_check, CanaryConfig.load().read_interval) == (False, 1)


def test_a_bad_value_is_one_sentence(monkeypatch):
    """It names the setting, the choices, and what was got."""
    monkeypatch.setenv("CANARY_ON_VIOLATION", "protected")
    with pytest.raises(ConfigError, match=r"CANARY_ON_VIOLATION: .*'quarantine' or 'protect', got 'protected'"):
        CanaryConfig.load()
