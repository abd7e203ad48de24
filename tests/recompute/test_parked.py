"""Prefixes in the cache whose request has ended, judged by a second computation: never where a record says that a slot
holds something else, or has changed."""

from dataclasses import replace

import pytest
import torch
from support.guarded import Guarded
from support.recomputed import ToyRecomputer
from support.toy import ToyEngine

from canary_core import CachedRequest, Kind, Recompute
from canary_core.watchers.recompute.parked import ParkedRecords

TOKENS = 64


class Parked:
    """A guarded toy engine, and a request of it as it lies in the cache."""

    def __init__(self) -> None:
        self.guarded = Guarded(ToyEngine(slots=512), bytes="off", read_check=0)
        self.engine, self.canary = self.guarded.engine, self.guarded.canary
        self.recomputer = ToyRecomputer(self.engine)
        self.judge = Recompute(self.canary, self.recomputer).judge
        self.guarded.submit("a", tokens=TOKENS)
        self.guarded.step(chunk=TOKENS)
        self.cached = replace(self.recomputer.cached("a"), parked=TOKENS)

    def verify(self, cached: CachedRequest | None = None):
        """The answer."""
        cached = cached or self.cached
        return self.judge.judge(cached, self.recomputer.compute(cached, TOKENS))


@pytest.fixture
def parked():
    """One for each test."""
    made = Parked()
    yield made
    made.canary.close()


def test_a_prefix_whose_slots_hold_it_is_judged(parked):
    """And its answer says that it is parked, in JSON as well."""
    answer = parked.verify()
    assert (answer.verdict, answer.tokens, answer.parked) == ("same", TOKENS, True)
    assert answer.to_dict()["parked"] is True
    assert type(answer).from_dict(answer.to_dict()) == answer
    assert answer.table().startswith("prefix of a: same, 64 tokens")


def test_a_slot_that_holds_another_token_position_or_prefix_is_gone(parked):
    """With wrong KV nothing is found: it may be right for whoever has the slots now. The tokens before are counted."""
    for k in parked.engine.k:
        k *= 1.5
    other = list(parked.cached.tokens)
    other[40] += 1
    slots = parked.cached.slots["full"]
    for changed, left in (
        (replace(parked.cached, tokens=other), 40),
        (replace(parked.cached, slots={"full": torch.cat((slots[:7], slots[8:9], slots[8:]))}), 7),
        (replace(parked.cached, slots={"full": slots.flip(0)}), 0),
    ):
        answer = parked.verify(changed)
        assert (answer.verdict, answer.tokens) == ("gone", left)
        assert f"{left} of the 64 tokens that it left in the prefix cache are still there" in answer.reason
    parked.canary.drain()
    assert [v.kind for v in parked.guarded.findings.violations if v.kind is Kind.RECOMPUTE] == []
    assert parked.canary.stats()["recompute_gone"] == 3


def test_a_slot_that_a_forward_writes_during_the_comparison_is_gone(parked):
    """Though it holds the same token again, at the same position behind the same prefix."""
    before = ParkedRecords(parked.canary.states, parked.cached)
    assert before.left(ParkedRecords(parked.canary.states, parked.cached)) == TOKENS
    one = parked.engine.requests[0]
    parked.engine.free[:0] = one.slots[48:]
    one.cached = 48
    del one.slots[48:]
    parked.guarded.step(chunk=16)
    later = ParkedRecords(parked.canary.states, parked.cached)
    assert before.left(later) == 48
    assert later.left(ParkedRecords(parked.canary.states, parked.cached)) == TOKENS


def test_too_little_of_a_prefix_is_gone_and_a_short_one_is_too_short(parked):
    """Nothing is computed for either."""
    few = replace(parked.cached, tokens=parked.cached.tokens[:16])
    assert (parked.judge.too_few(few).verdict, parked.judge.too_few(few).tokens) == ("gone", 16)
    short = parked.judge.too_few(replace(few, parked=16))
    assert (short.verdict, short.parked) == ("unjudged", True)


def test_a_parked_prefix_teaches_nothing(parked):
    """Weights may have changed since."""
    for _ in range(20):
        assert parked.verify().verdict == "same"
    assert parked.judge.noise.equal_requests == 0
