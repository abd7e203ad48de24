"""What is noted of each slot on the device is what the engine did with it."""

import pytest

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.takes_turns("lives of slots in tests/ops/test_histories.py and tests/test_slots.py"),
]

PROMPT = [(7 * i) % 90 + 9 for i in range(24)]
OTHERS = [[(n * i + n) % 90 + 9 for i in range(30)] for n in (11, 13, 17, 19, 23)]


def test_a_slots_life_is_the_engines(launch):
    """Handed out, written, parked, shared by a prefix hit, parked again; then evicted, handed out to another request,
    written, parked: the steps and the requests are those of the engine's own allocator and tables, for every slot of a
    request, as far as four entries go, but the last: the second request computes that position again."""
    hit, end = launch({}, like="pressure").slot_lives(prompt=PROMPT, others=OTHERS)
    for theirs, ours in zip(hit["theirs"][:-1], hit["ours"][:-1], strict=True):
        # The plugin tells of a hit, not of whose it is.
        assert ours == [[step, event, None if event == "share" else by] for step, event, by in theirs[-4:]]
        assert [event for _, event, _ in theirs] == ["alloc", "write", "park", "share", "park"]
    for theirs, ours in zip(end["theirs"][:-1], end["ours"][:-1], strict=True):
        assert ours == theirs[-4:]
        assert [event for _, event, _ in ours] == ["evict", "alloc", "write", "park"]
