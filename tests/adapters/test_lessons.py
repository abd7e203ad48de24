"""Internal requests that a scheduler learns noise from, where hits touch all requests of users."""

from unittest import mock

import pytest
import torch

from canary_adapters import lessons
from canary_adapters.block_events import BlockGroup
from canary_adapters.internal_requests import InternalRequests, RecomputePair, Running, is_internal
from canary_adapters.lessons import AT_ONCE, LESSON, LESSON_TOKENS, PATIENCE
from canary_adapters.recompute_pairs import RecomputePairs
from canary_adapters.recompute_requests import EVERY, Recomputes
from canary_adapters.touched_requests import TouchedRequests
from canary_core import Canary, CanaryConfig, KVSource, Region, Touch
from canary_core.config.values import RecomputeShare
from canary_core.plugins import private_hooks


class Engine:
    """Serves ``users`` forever, with a hit of 16 tokens each: a step decodes a token of each and of a lesson."""

    def __init__(self, share="100%", users=("first", "second"), fresh=(), longest=1000):
        self.fake = mock.create_autospec(InternalRequests, instance=True, parked="nothing is remembered")
        self.fake.longest = longest
        self.requests = {name: Running(name, 40, 0, 0) for name in (*users, *fresh)}
        self.pairs, self.crowded = [], False
        touched = TouchedRequests()
        for name in users:
            touched.began(name, 16)
        self.fake.running.side_effect = lambda: [one for one in self.requests.values() if not is_internal(one.name)]
        self.fake.find.side_effect = self.requests.get
        self.fake.begin.side_effect = self._begin
        self.fake.end.side_effect = lambda name: self.requests.pop(name, None)
        self.fake.computed.side_effect = lambda name: self.requests[name].tokens if name in self.requests else None
        self.fake.crowded.side_effect = lambda name: self.crowded
        self.recomputes = Recomputes(self.fake, touched, share and RecomputeShare.parse(share))

    def _begin(self, name, request, tokens, new_tokens=1):
        self.requests[name] = Running(name, tokens, 0, 0)

    @property
    def lessons(self):
        """How many were begun."""
        return sum(call.args[3:] == (LESSON_TOKENS,) for call in self.fake.begin.mock_calls)

    def steps(self, count, tokens=1000):
        """So many batches."""
        for _ in range(count):
            self.recomputes.before()
            for one in self.requests.values():
                self.requests[one.name] = Running(one.name, one.tokens + 1, one.decoded + 1, 0)
            pairs = [pair for pair in self.recomputes.after(tokens) if pair.why is None]
            for pair in pairs:
                del self.requests[pair.again]
            self.pairs += pairs

    def counted(self):
        """Since the last call."""
        return self.recomputes.counted()


def test_lessons_are_begun_once_workers_lack_them_and_end_once_compared():
    """One at a time, with an answer long enough to teach; touched requests alone are chosen before and after."""
    engine = Engine()
    engine.steps(100)
    assert (engine.lessons, {is_internal(pair.request) for pair in engine.pairs}) == (0, {False})
    engine.pairs.clear()
    engine.recomputes.want(LESSON)
    engine.steps(AT_ONCE * 60)
    taught = [pair for pair in engine.pairs if is_internal(pair.request)]
    assert len(taught) == engine.lessons == engine.counted()["recompute_lessons"] == AT_ONCE
    assert all(pair.teaches for pair in taught)
    assert not is_internal(engine.pairs[-1].request)
    assert not [*filter(is_internal, engine.requests)]


def test_a_fresh_request_of_a_user_comes_before_a_lesson():
    """It teaches for nothing."""
    engine = Engine(fresh=["fresh"])
    engine.steps(40)
    engine.recomputes.want(LESSON)
    engine.pairs.clear()
    engine.steps(80)
    assert "fresh" in [pair.request for pair in engine.pairs]
    assert engine.lessons == 0


def test_fresh_requests_that_end_too_soon_are_not_awaited_for_ever():
    """In an engine with short answers there is always one that may teach, and none does."""
    engine = Engine(fresh=["short"])
    engine.recomputes.want(LESSON)
    for step in range(EVERY * PATIENCE + 60):
        engine.requests["short"] = Running("short", 40, 0, 0)
        engine.steps(1)
        if step == EVERY * PATIENCE - EVERY:
            assert engine.lessons == 0
    assert engine.lessons >= 1


def test_without_a_share_nothing_but_lessons_is_begun():
    """Nothing before somebody's request had no verdict, and nothing after."""
    engine = Engine(share=None)
    engine.steps(40)
    assert engine.pairs == []
    engine.recomputes.want(LESSON)
    engine.steps(AT_ONCE * 60)
    assert len(engine.pairs) == engine.lessons == AT_ONCE
    assert all(is_internal(pair.request) for pair in engine.pairs)


def test_a_lesson_ends_after_a_batch_that_leaves_users_waiting():
    """Not before the batch is made; another one begins later, behind a second computation of a user's request."""
    engine = Engine()
    engine.recomputes.want(LESSON)
    engine.steps(EVERY)
    assert engine.lessons == 1
    (lesson,) = filter(is_internal, engine.requests)
    engine.crowded = True
    engine.recomputes.before()
    assert lesson in engine.requests
    engine.recomputes.after(1000)
    assert lesson not in engine.requests
    assert engine.counted()["recompute_lessons_ended"] == 1
    engine.crowded = False
    engine.pairs.clear()
    engine.steps(60)
    assert engine.lessons == 2
    assert not is_internal(engine.pairs[0].request)


def test_lessons_are_charged_to_the_share():
    """And yet the one that was begun is compared before it ends."""
    engine = Engine(share="1%")
    engine.recomputes.want(LESSON)
    engine.steps(60, tokens=100)
    assert (engine.lessons, [is_internal(pair.request) for pair in engine.pairs]) == (1, [True])
    engine.steps(150, tokens=100)
    assert engine.lessons == 2


def test_lessons_are_never_endless(monkeypatch):
    """However often workers lack them."""
    monkeypatch.setattr(lessons, "MOST_LESSONS", AT_ONCE)
    engine = Engine()
    for _ in range(10):
        engine.recomputes.want(LESSON)
        engine.steps(200)
    assert AT_ONCE <= engine.lessons < 2 * AT_ONCE


@pytest.mark.parametrize("longest", [0, 100])
def test_where_none_fits_it_is_counted(longest):
    """In an engine whose internal requests can't decode, or where its requests are too long: touched ones are chosen as
    before."""
    engine = Engine(longest=longest)
    engine.recomputes.want(LESSON)
    engine.steps(400)
    assert engine.lessons == 0
    assert engine.counted()["recompute_no_lesson"] == AT_ONCE
    assert engine.pairs


def test_workers_lack_lessons_where_a_touched_request_has_no_verdict():
    """For want of noise: not of a request that teaches itself, nor of one without numbers."""
    kv = torch.randn(128, 8)
    source = KVSource(kv, "k", 0, chunk_bytes=32, slot_stride_bytes=32, dtype=torch.float32)
    config = CanaryConfig.load(mode="log", silence_s=0, bytes="off")
    canary = Canary([Region("kv", 128, (source,))], config, hooks=private_hooks())
    worker = RecomputePairs(canary, [BlockGroup("kv", 0, 16)], lambda: 1e-7, list)
    own, held, hit = ((5, 6, 7),), ((1, 2, 3),), (Touch("hit", 16),)

    def lacks(**fields):
        worker.compare([RecomputePair("one", "canary-recompute-1", tokens=40, **fields)])
        worker.read()
        return [*worker.wanted()]

    assert lacks(decoded=34, held=held, own=own) == []
    assert lacks(decoded=34, touches=hit) == []
    assert lacks(decoded=34, held=held, own=own, touches=hit) == [LESSON]
    assert lacks(decoded=34, held=held, own=held, touches=hit) == []
    canary.close()
