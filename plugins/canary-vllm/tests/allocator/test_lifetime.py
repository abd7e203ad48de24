"""Messages of the scheduler are replayed in few events, and each block sees its own in order."""

from typing import Any

from canary_vllm.allocator.lifetime import runs_of
from canary_vllm.allocator.messages import BlockEvent
from hypothesis import given
from hypothesis import strategies as st

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
