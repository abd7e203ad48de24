"""What is found of a slot of which something was told before: every new damage, and nothing twice."""

import torch
from support.guarded import Guarded

from canary_core import Kind
from canary_core.records import FIRST_CONTENT


def told(guarded: Guarded) -> list[tuple[Kind, str | None, str | None]]:
    """What was found since it was last asked for: kind, source, request."""
    guarded.canary.drain()
    found = [(v.kind, v.source, v.request) for v in guarded.violations]
    guarded.violations.clear()
    return found


def lose(guarded: Guarded) -> None:
    """A forward whose store to layer 0's keys does not run."""
    kept = guarded.engine.k[0].clone()
    batch = guarded.engine.batch()
    guarded.canary.step.before(batch)
    guarded.engine.forward(batch)
    guarded.engine.k[0].copy_(kept)
    guarded.canary.step.after(batch)
    guarded.canary.step.end()


def test_a_flip_after_a_lost_write_is_told() -> None:
    """What lies in the slot is what Canary compares with from then on."""
    guarded = Guarded(read_check=-1)
    request = guarded.submit("a")
    lose(guarded)
    assert told(guarded) == [(Kind.LOST_WRITE, "k.0", "a")] * 3
    guarded.decode()
    assert told(guarded) == []
    guarded.engine.k[0][request.slots[1]] += 1
    guarded.decode()
    assert told(guarded) == [(Kind.BYTES, "k.0", "a")]


def test_a_slot_whose_write_is_lost_again_is_told_again() -> None:
    """By another request, or by the same one that writes another token there: the bytes are what they were, twice."""
    guarded = Guarded(read_check=-1)
    request = guarded.submit("a", 1)
    lose(guarded)
    assert told(guarded) == [(Kind.LOST_WRITE, "k.0", "a")]
    for tokens in ([77], [78]):
        request.tokens, request.cached = list(tokens), 0
        guarded.engine.free[:0] = request.slots
        request.slots = []
        lose(guarded)
        assert told(guarded) == [(Kind.LOST_WRITE, "k.0", "a")]
    guarded.engine.requests.remove(request)
    guarded.engine.free[:0] = request.slots
    guarded.submit("b", 1)
    lose(guarded)
    assert told(guarded) == [(Kind.LOST_WRITE, "k.0", "b")]


def test_content_that_may_be_the_same_is_not_told() -> None:
    """A picture or a sound that comes again under another number, over itself or over tokens: only counted."""
    guarded = Guarded(read_check=-1)
    request = guarded.submit("a", 1)
    guarded.step()
    unsure = 0
    for token in (FIRST_CONTENT + 7, FIRST_CONTENT + 1000, 77):
        request.tokens, request.cached = [token], 0
        guarded.engine.free[:0] = request.slots
        request.slots = []
        lose(guarded)
        assert told(guarded) == []
        assert guarded.canary.stats()["unsure"] > unsure
        unsure = guarded.canary.stats()["unsure"]


def test_changed_bytes_stay_wrong_until_they_are_written_or_are_what_they_were() -> None:
    """Each further change is told; bytes that come back are right again; a change that was told is not told twice,
    unless the slot was written since."""
    guarded = Guarded(read_check=-1)
    request = guarded.submit("a")
    guarded.decode()
    row = guarded.engine.k[0][request.slots[1]]
    kept = row.clone()
    for value in (1.0, 2.0):
        row.copy_(torch.full_like(row, value))
        guarded.decode()
        guarded.decode()
        assert told(guarded) == [(Kind.BYTES, "k.0", "a")]
    row.copy_(kept)
    guarded.decode()
    assert told(guarded) == []
    row.copy_(torch.full_like(row, 1.0))
    guarded.decode()
    assert told(guarded) == []
    assert guarded.canary.stats()["repeated"] > 0
