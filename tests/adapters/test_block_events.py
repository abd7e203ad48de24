"""`BlockEvents`: what a scheduler did is told in few events, and each block sees its own in order."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from canary_adapters import BlockEvent, BlockEvents, BlockGroup
from canary_adapters.block_events import runs_of
from canary_core import Canary, CanaryConfig, Kind, KVSource, Region

SORTS = ("alloc", "park", "share", "evict", "free", "forget")
EVENTS = st.lists(
    st.builds(
        BlockEvent,
        sort=st.sampled_from(SORTS),
        request=st.sampled_from(["a", "b", None]),
        blocks=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
        group=st.sampled_from([None, 0]),
    ),
    max_size=30,
)


def histories(events: Any) -> dict[int, list[tuple[object, ...]]]:
    """What happened to each block, in order."""
    seen: dict[int, list[tuple[object, ...]]] = {}
    for event in events:
        for block in event.blocks:
            seen.setdefault(block, []).append((event.sort, event.request, event.group))
    return seen


@given(EVENTS)
def test_each_block_sees_its_events_in_order(events):
    """Whatever joins an earlier run. A run is of one sort, and has no block twice: who of two comes first is told."""
    runs = runs_of(events)
    assert histories(event for run in runs for event in run) == histories(events)
    for run in runs:
        assert len({(event.sort, event.group) for event in run}) == 1
        blocks = [block for event in run for block in event.blocks]
        assert len(blocks) == len(set(blocks))


def test_a_batch_that_begins_is_two_runs():
    """Each of its requests shares blocks of a prefix and is given one of its own."""
    events = []
    for number in range(64):
        events.append(BlockEvent("share", f"r{number}", [2 * number + 1]))
        events.append(BlockEvent("alloc", f"r{number}", [2 * number + 2]))
    assert [(run[0].sort, len(run)) for run in runs_of(events)] == [("share", 64), ("alloc", 64)]


def canary() -> Canary:
    """Two regions of 64 slots."""
    pools = {name: torch.zeros(64, 4) for name in ("full", "window")}
    regions = [Region(name, 64, (KVSource(pool, "k", i, 16, 16),)) for i, (name, pool) in enumerate(pools.items())]
    return Canary(regions, CanaryConfig(scrub_budget="0", silence_s=0.0, log_level="error"))


GROUPS = [BlockGroup("full", 0, 16), BlockGroup("window", 1, 16)]


def found(guarded: Canary) -> list[tuple[Kind, str, int]]:
    """Kind, region and block of each incident."""
    guarded.drain()
    return sorted((i.root.kind, i.root.region, int(i.root.slot or 0) // 16) for i in guarded.incidents)


def test_events_are_told_of_all_groups_or_of_their_own():
    """A block that is freed twice is told in both regions; one that is freed again for one group, in its region."""
    guarded = canary()
    events = BlockEvents(guarded, GROUPS, lambda name: 1)
    events.tell([BlockEvent("alloc", "a", [1, 2]), BlockEvent("free", "a", [1, 2]), BlockEvent("free", "a", [1])])
    events.tell([BlockEvent("free", "a", [2], group=1)])
    assert found(guarded) == [
        (Kind.DOUBLE_FREE, "full", 1),
        (Kind.DOUBLE_FREE, "window", 1),
        (Kind.DOUBLE_FREE, "window", 2),
    ]
    guarded.close()


def test_misuse_is_no_finding_where_only_content_is_followed():
    """The same events, not judged."""
    guarded = canary()
    events = BlockEvents(guarded, GROUPS, lambda name: 1, judged=False)
    events.tell([BlockEvent("alloc", "a", [1]), BlockEvent("free", None, [1]), BlockEvent("free", None, [1])])
    assert found(guarded) == []
    guarded.close()


def test_what_is_forgotten_is_not_judged():
    """A block whose bytes arrived is no double release."""
    guarded = canary()
    events = BlockEvents(guarded, GROUPS, lambda name: 1)
    events.tell([BlockEvent("alloc", "a", [3]), BlockEvent("forget", "a", [3]), BlockEvent("free", "a", [3])])
    assert found(guarded) == []
    guarded.close()
