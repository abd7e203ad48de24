"""Messages of the scheduler are replayed in few events, and each block sees its own in order."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from canary_vllm.allocator.lifetime import Lifetime, runs_of
from canary_vllm.allocator.messages import BlockEvent, Message
from canary_vllm.batches.requests import Requests
from hypothesis import given
from hypothesis import strategies as st

from canary_core import Canary, CanaryConfig, Kind, KVSource, Region, Writers

pytestmark = pytest.mark.without_engine

SORTS = ("alloc", "park", "share", "evict", "free", "same_step", "arrive")
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


@pytest.mark.parametrize(("number", "kinds"), [(0, []), (1, [Kind.DOUBLE_ALLOC])])
def test_what_vllm_warms_up_with_is_nobodys(number, kinds):
    """Its warm-up writes blocks that no scheduler has handed out. They may be handed out by the scheduler's first
    output. Where others came before that, who has a block is known."""
    pool = torch.zeros(64, 4)
    config = CanaryConfig(scrub_budget="0", silence_s=0.0, log_level="error")
    canary = Canary([Region("full", 64, (KVSource(pool, "k", 0, 16, 16),), null_slot=0)], config)
    requests = Requests(Writers(), pool.device)
    group: Any = SimpleNamespace(region="full", number=0, block=16)
    canary.slots.alloc("full", torch.arange(16, 32), 1)
    lifetime = Lifetime(canary, [group], requests, judged=True)
    lifetime.replay(Message(number, [BlockEvent("alloc", "first", [1])]))
    canary.drain()
    assert {v.root.kind for v in canary.incidents} == set(kinds)
    canary.close()
