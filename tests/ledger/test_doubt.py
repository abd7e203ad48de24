"""How the ledger ages: what it can't judge any more is a figure, and is told before it is useless."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger.host_tier import HostTier
from ledger.test_histories import history
from support.toy import ToyEngine

from canary_desk.metrics.readings import MetricReading

PROMPT = list(range(5, 22))


def evict(tier, blocks):
    """The ledger is told of so many blocks of other prefixes, far more than it has room for."""
    table = tier.g.canary.ledger._regions["full"].table
    values = torch.zeros(blocks, table._values.shape[1], dtype=torch.int64)
    hashes = torch.randint(-(2**63), 2**63 - 1, (blocks,), generator=torch.Generator().manual_seed(blocks))
    table.add(hashes, hashes, values)
    tier.g.canary.drain()


def told(tier):
    """The regions and whole tenths of the events."""
    return [(e.level, e.fields["region"], int(e.fields["ratio"] * 10)) for e in tier.g.findings.told("ledger_doubt")]


def test_doubt_is_told_at_a_tenth_and_at_a_half():
    """Once each, with what to do; the figure is in the stats, in the metric, and nowhere before anything was kept."""
    tier = HostTier.make(ledger=1 << 14)
    assert tier.g.canary.ledger.doubt_ratio is None
    assert "ledger_doubt_ratio" not in tier.g.canary.stats()
    tier.save(tier.compute(PROMPT))
    tier.g.canary.drain()
    assert tier.g.canary.ledger.doubt_ratio == 0
    evict(tier, 1500)
    assert told(tier) == []
    for blocks in (2600, 10, 8000, 10):
        evict(tier, blocks)
    (level, region, tenth), (_, _, half) = told(tier)
    assert (level, region) == ("warning", "full")
    assert 1 <= tenth < 5 <= half
    assert "CANARY_LEDGER" in tier.g.findings.told("ledger_doubt")[0].fields["reason"]
    ratio = tier.g.canary.stats()["ledger_doubt_ratio"]
    assert 0.5 < ratio <= 1
    assert abs(MetricReading.of(tier.g.canary).ledger_doubt - ratio) < 0.001


def test_blocks_that_come_back_count_too():
    """Where most of what comes back was evicted, the figure says so, though few other prefixes are in doubt."""
    tier = HostTier.make(ledger=1 << 20)
    ledger = tier.g.canary.ledger
    tier.save(tier.compute(PROMPT))
    tier.g.canary.drain()
    kept = ledger._regions["full"]
    kept.table.doubt.add(kept.table.rows()[0].tolist())
    kept._looked_up, kept._in_doubt = 100, 30
    assert ledger.doubt_ratio == 0.3
    tier.load(PROMPT, lambda _block, _source, data: data.view(torch.uint8).bitwise_not_().view(data.dtype))
    tier.g.canary.drain()
    assert tier.g.violations == []
    assert tier.counts("unknown") == [4]
    assert (kept._looked_up, kept._in_doubt) == (104, 34)


def test_doubt_leaves_when_nothing_can_come_back():
    """The engine has emptied its cache and the tier: what was evicted is judged again, and the event may come again."""
    tier = HostTier.make(engine=ToyEngine(slots=512), ledger=1 << 14)
    ledger = tier.g.canary.ledger
    tier.finish(tier.save(tier.compute(PROMPT)))
    tier.g.canary.drain()
    evict(tier, 9000)
    assert len(told(tier)) == 1
    tier.finish(tier.load(PROMPT, flip))
    tier.g.canary.drain()
    assert (tier.g.violations, tier.counts("unknown")) == ([], [4])
    tier.stored.clear()
    assert ledger.emptied()
    assert ledger.doubt_ratio == 0
    tier.finish(tier.save(tier.compute(PROMPT, "anew")))
    tier.finish(tier.load(PROMPT, flip, "again"))
    tier.g.canary.drain()
    assert {v.position for v in tier.g.violations} == {0, 4, 8, 12}
    evict(tier, 9001)
    assert len(told(tier)) == 2


def test_doubt_stays_while_bytes_are_on_their_way():
    """They left before the tier was emptied."""
    tier = HostTier.make(ledger=1 << 14)
    ledger = tier.g.canary.ledger
    tier.finish(tier.save(tier.compute(PROMPT)))
    tier.g.canary.drain()
    evict(tier, 9000)
    request, arrival = tier.claim(PROMPT)
    ledger.expect(arrival)
    assert not ledger.emptied()
    assert ledger.doubt_ratio > 0.5
    tier.copy(request, flip)
    ledger.arrive(arrival)
    # Not looked at yet: judged by what was doubtful when it came.
    assert ledger.emptied()
    assert tier.g.violations == []
    assert tier.counts("unknown") == [4]


def flip(_block, _source, data):
    """Other bytes, everywhere."""
    return data.view(torch.uint8).bitwise_not_().view(data.dtype)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6))
def test_what_is_forgotten_is_never_an_alarm(seed):
    """A ledger far too small, numerics that change, a tier that is emptied now and then: whatever is found was
    broken."""
    broken, found, others, _ = history(seed, ledger=5 * 230, empties=0.2)
    assert not set(found) - set(broken)
    assert others == []


def test_judging_begins_anew_with_each_emptying():
    """Over the same histories more of what was broken is found than where doubt stays, and no more than was broken."""
    totals = []
    for empties in (0.0, 0.2):
        broken, found = zip(*(history(seed, ledger=5 * 230, empties=empties)[:2] for seed in range(12)), strict=True)
        totals.append((sum(map(len, broken)), sum(map(len, found))))
    (_, before), (all_of_them, after) = totals
    assert before < after <= all_of_them
