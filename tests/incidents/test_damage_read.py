"""Writes of requests that have read damaged bytes: where these make one number of all, a write leaves no trace, and no
store was lost."""

import pytest
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import Kind

PROMPT = list(range(5, 17))


class Saturated(ToyEngine):
    """An engine whose attention spreads damage: what a request writes that reads a damaged slot is the same ``number``
    whatever the token."""

    damaged: int = 0
    number: float = 0.25

    def forward(self, batch):
        """Writes K and V of the new tokens."""
        slots = [r.slots[r.cached : r.cached + n] for r, n in zip(self.requests, self.news, strict=True)]
        hit = [self.damaged in r.slots[: r.cached] for r in self.requests]
        super().forward(batch)
        for of, reads in zip(slots, hit, strict=True):
            for tensor in (*self.k, *self.v) if reads else ():
                tensor[of] = self.number


@pytest.fixture
def served():
    """A prompt in the cache whose fourth slot has changed, as a request is told that reads it; everything is compared
    before each forward."""
    guarded = Guarded(Saturated(), read_check=-1)
    owner = guarded.engine.submit("owner", PROMPT)
    guarded.step(16)
    # All slots have been written before: what the memory held at first proves nothing.
    for number in range(3):
        request = guarded.engine.submit(f"before-{number}", list(range(40, 56)))
        guarded.step(16)
        guarded.engine.finish(request)
    guarded.engine.damaged = owner.slots[3]
    guarded.engine.v[1][owner.slots[3]] += 1
    return guarded, owner


def ask(guarded, owner, name):
    """A request that shares the prompt, computes six tokens of its own, and leaves: the next one gets its slots."""
    request = guarded.engine.submit(name, [*PROMPT, *range(70 + len(name), 76 + len(name))], owner, len(PROMPT))
    guarded.step(16)
    slots = request.slots[len(PROMPT) :]
    guarded.engine.finish(request)
    guarded.engine.free.sort(key=lambda slot: slot not in slots)
    guarded.canary.drain()
    return slots


def roots(guarded):
    """The kinds of the incidents' roots, and how many lost writes each has."""
    return [(i.root.kind, i.kinds.get(Kind.LOST_WRITE, 0)) for i in guarded.canary.incidents]


@pytest.mark.parametrize("number", [0.5, float("nan")])
def test_what_is_written_after_damage_was_read_belongs_to_the_damage(served, number):
    """Also of a request whose reading was only counted, since the same change had been told before."""
    guarded, owner = served
    guarded.engine.number = number
    first = ask(guarded, owner, "ann")
    assert roots(guarded)[0] == (Kind.BYTES, 0)
    again = ask(guarded, owner, "robert")
    assert again == first
    lost = [v for v in guarded.violations if v.kind is Kind.LOST_WRITE]
    assert {v.request for v in lost} == {"robert"}
    assert sum(kind is Kind.LOST_WRITE for kind, _ in roots(guarded)) == 0
    assert roots(guarded)[0] == (Kind.BYTES, len(lost))
    (incident, *_) = guarded.canary.incidents
    assert {"ann", "robert"} <= set(incident.requests)


def test_nan_of_a_request_that_never_read_the_damage(served):
    """Attention under a mask spreads NaN over a whole batch: by the fingerprint the bytes are known to hold NaN."""
    guarded, owner = served
    guarded.engine.number = float("nan")
    slots = ask(guarded, owner, "ann")
    other = guarded.engine.submit("other", list(range(90, 96)))
    forward = guarded.engine.forward

    def spread(batch):
        forward(batch)
        for tensor in (*guarded.engine.k, *guarded.engine.v):
            tensor[other.slots] = float("nan")

    guarded.engine.forward = spread
    guarded.step(16)
    assert other.slots == slots
    guarded.canary.drain()
    lost = [v for v in guarded.violations if v.kind is Kind.LOST_WRITE]
    assert {v.request for v in lost} == {"other"}
    assert "NaN" in lost[0].explanation
    assert sum(kind is Kind.LOST_WRITE for kind, _ in roots(guarded)) == 0


def test_a_store_that_was_lost_beside_damage_is_told_by_itself(served):
    """Of a request that has not read it, and whose bytes are numbers: an incident of its own."""
    guarded, owner = served
    ask(guarded, owner, "ann")
    other = guarded.engine.submit("other", list(range(90, 96)))

    def lose(batch):
        for request, new in zip(guarded.engine.requests, guarded.engine.news, strict=True):
            request.cached += new

    guarded.engine.forward = lose
    guarded.step(16)
    guarded.canary.drain()
    assert (Kind.LOST_WRITE, len(other.slots) * 4) in roots(guarded)
