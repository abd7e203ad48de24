"""`count_breaches` and `BlockSweep`: what a scheduler must not say of its blocks."""

from collections import Counter

import pytest
import torch

from canary_adapters import BlockBreach, BlockEvent, BlockGroup, BlockSweep, add_event, count_breaches
from canary_adapters.block_breaches import MOST_BREACHES
from canary_core import Canary, CanaryConfig, Kind, KVSource, Region


@pytest.mark.parametrize(
    ("count", "held", "free", "rules"),
    [
        (2, 2, 0, []),
        (3, 2, 0, []),
        (0, 0, 1, []),
        (1, 2, 0, ["ref_low"]),
        (-1, 0, 0, ["ref_negative"]),
        (1, 1, 1, ["in_use_free"]),
        (0, 0, 2, ["free_twice"]),
        (-2, 1, 2, ["ref_negative", "ref_low", "free_twice"]),
    ],
)
def test_counts_must_not_contradict_who_has_a_block(count, held, free, rules):
    """Others than requests may have one, too; nobody may have one that is free."""
    found = list(count_breaches({7: count, 8: 0}, Counter({7: held}), Counter({7: free})))
    assert [breach.rule for breach in found] == rules
    assert {breach.block for breach in found} <= {7}


def test_a_sweep_tells_the_first_breaches_once():
    """As findings of the group's slots; a sweep that finds them again has nothing new."""
    pool = torch.zeros(64 * 40, 4)
    config = CanaryConfig(scrub_budget="0", silence_s=0.0, log_level="error")
    canary = Canary([Region("full", len(pool), (KVSource(pool, "k", 0, 16, 16),))], config)
    sweep = BlockSweep.of(3, (BlockBreach("ref_low", block, "so it is") for block in range(MOST_BREACHES + 1)))
    for _ in range(2):
        sweep.report(canary, BlockGroup("full", 0, 16))
    canary.drain()
    told = [event for _, event in canary.recent_events if event.name == "sweep"]
    assert [event.fields["findings"] for event in told] == [MOST_BREACHES, 0]
    assert {v.root.kind for v in canary.incidents} == {Kind.CACHE_STRUCTURE}
    assert canary.stats()["sweeps"] == 2
    canary.close()


def test_events_of_one_sort_in_a_row_are_one():
    """Of the same request and group; without blocks there is none."""
    events: list[BlockEvent] = []
    for sort, request, blocks in [
        ("alloc", "a", []), ("alloc", "a", [1]), ("alloc", "a", [2, 3]), ("alloc", "b", [4]), ("free", "b", [4]),
        ("free", "b", []),
    ]:  # fmt: skip
        add_event(events, BlockEvent(sort, request, blocks))
    assert [(event.sort, event.request, event.blocks) for event in events] == [
        ("alloc", "a", [1, 2, 3]),
        ("alloc", "b", [4]),
        ("free", "b", [4]),
    ]
