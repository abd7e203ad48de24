"""How the ledger ages: what it can't judge any more is a figure, and is told before it is useless."""

import torch
from ledger.host_tier import HostTier

from canary_core.desk.metrics.readings import MetricReading

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
