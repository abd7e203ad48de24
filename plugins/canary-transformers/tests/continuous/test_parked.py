"""Prefixes that ended requests left in the cache of continuous batching, computed again: wrong ones are told, clean
ones and those that are gone never are, and the cache stays what it was. The engine is broken from outside only."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from canary_transformers.conformance import continuous
from tiny.verified import HIT, Verified, several, tokens, weights_change

from canary_core import CanaryError, Kind, Verification
from canary_core.watchers.recompute import recompute

pytestmark = pytest.mark.usefixtures("one_thread")

LEFT = 96
"""Tokens in whole blocks of a request with 40 tokens and 60 new ones: the last one has no KV."""

POOL = 1024
"""Tokens of the pool: twelve such requests are remembered."""


class Parked(Verified):
    """Its clients may ask for what ended requests left."""

    def close(self) -> None:
        """See `Verified`."""
        self.guard.close()
        super().close()

    @property
    def verifier(self) -> Any:
        """Of the only session."""
        return self.guard._sessions[0].verifier

    @property
    def allocator(self) -> Any:
        """The engine's own."""
        (allocator,) = self.engine._cache.cache_allocators.values()
        return allocator

    def blocks(self, name: str, prompt: list[int]) -> list[int]:
        """What the next hit would find of a request."""
        found: list[int] = self.allocator.match_prefix_blocks([*prompt, *self.engine.answer(name)])
        return found

    def prefixes(self, *names: str | None) -> list[Verification]:
        """The answers for these, or (None) for all, of an engine whose loop turns."""
        asked = [self.verifier.ask(name, parked=True) for name in names]
        for _ in range(100):
            self.step()
            if all(one.done() for one in asked):
                break
        return [answer for one in asked for answer in one.result(0)]

    def ended(self, name: str, prompt: list[int]) -> None:
        """A request of 40 tokens and 60 new ones ran to its end."""
        self.submit(name, prompt)
        self.finish()


@pytest.fixture
def engine(guard: Callable[..., Any], tmp_path, monkeypatch) -> Iterator[Callable[..., Parked]]:
    """Makes one, and restores the model's weights after the test."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("CANARY_CONTROL_DIR", str(tmp_path))
    monkeypatch.setattr(continuous, "POOL_TOKENS", POOL)
    yield from several(lambda *args, **kwargs: Parked(guard, *args, **{"control": "write", **kwargs}))


def verdicts(answers: list[Verification]) -> list[tuple[str, str, int]]:
    """Request, verdict and number of tokens of each, all of them parked."""
    assert all(answer.parked for answer in answers)
    return [(answer.request, answer.verdict, answer.tokens) for answer in answers]


def told(parked: Parked) -> list[tuple[Any, ...]]:
    """Layer, position, request and rule of each finding by a second computation."""
    found = [v for v in parked.guard.violations if v.kind is Kind.RECOMPUTE]
    return [(v.layer, v.position, v.request, v.rule) for v in found]


def ledger(parked: Parked) -> list[list[Any]]:
    """The engine's tables of blocks, in their order."""
    own = parked.allocator.ledger
    tables = (own.hash_to_block, own.block_to_hash, own.cached_blocks, own.shared_ref_counts)
    return [list(table.items()) for table in tables]


def test_a_clean_prefix_is_the_same_in_an_engine_that_serves_nobody(engine):
    """Alone, after a hit, and where two requests with the same tokens came to share blocks. The engine's tables of the
    prefix cache keep content and order."""
    parked = engine()
    parked.taught()
    prompt = tokens(parked.random)
    parked.ended("alone", prompt)
    parked.ended("hits", [*prompt[:HIT], *tokens(parked.random, 8)])
    parked.engine.evict()
    twin = tokens(parked.random)
    parked.submit("one", twin)
    parked.submit("two", twin)
    parked.finish()
    before = ledger(parked)
    assert verdicts(parked.prefixes("one", "two")) == [("one", "same", LEFT), ("two", "same", LEFT)]
    assert verdicts(parked.prefixes("alone", "hits")) == [("alone", "gone", 0), ("hits", "gone", 0)]
    assert ledger(parked) == before
    every = {answer.request: answer.verdict for answer in parked.prefixes(None)}
    assert {name for name, verdict in every.items() if verdict == "same"} == {"one", "two"}
    assert set(every) >= {"alone", "hits", "one", "two"}
    assert set(every.values()) == {"same", "gone"}
    assert parked.guard.violations == []
    parked.ended("alone", prompt)
    parked.ended("hits", [*prompt[:HIT], *tokens(parked.random, 8)])
    assert verdicts(parked.prefixes("alone", "hits")) == [("alone", "same", LEFT), ("hits", "same", LEFT)]


def test_weights_changed_under_a_kept_cache_are_told_without_a_hit(engine, monkeypatch):
    """Of each prefix of the old weights, however it came there; one of the new weights is well."""
    parked = engine(hit_check=False)
    parked.taught()
    prompt = tokens(parked.random)
    parked.ended("before", prompt)
    parked.ended("hit", [*prompt[:HIT], *tokens(parked.random, 8)])
    assert verdicts(parked.prefixes("before")) == [("before", "same", LEFT)]
    weights_change(parked, monkeypatch)
    parked.ended("after", tokens(parked.random))
    answers = parked.prefixes("before", "hit", "after")
    assert verdicts(answers) == [("before", "differs", LEFT), ("hit", "differs", LEFT), ("after", "same", LEFT)]
    assert told(parked) == [(1, 0, "before", "weights"), (1, 0, "hit", "weights")]
    assert f"it has ended, and the prefix cache keeps {LEFT} tokens of it" in answers[0].finding


def test_parked_kv_that_changed_is_told_where_it_did(engine):
    """Written from outside in the engine's own tensor. One byte is a finding of its own, as it is for running
    requests: a median does not see it."""
    parked = engine()
    parked.taught()
    prompts = {name: tokens(parked.random) for name in ("ill", "byte", "well")}
    for name, prompt in prompts.items():
        parked.ended(name, prompt)
    k, _ = parked.allocator._kv_token_views[1]
    for page in parked.blocks("ill", prompts["ill"])[4:8]:
        first = page * parked.allocator.block_physical_stride
        k[first : first + 8] *= 1.01
    block = parked.blocks("byte", prompts["byte"])[3]
    parked.engine._part(2, "v")[block, 5, 2] ^= 16
    assert verdicts(parked.prefixes("well")) == [("well", "same", LEFT)]
    assert parked.guard.violations == []
    assert verdicts(parked.prefixes("ill")) == [("ill", "differs", LEFT)]
    assert told(parked) == [(1, 32, "ill", "half")]
    parked.prefixes("byte")
    parked.guard._sessions[0].drain()
    found = [v for v in parked.guard.violations if v.layer == 2]
    assert [(v.kind, v.half, v.slot) for v in found] == [(Kind.BYTES, "v", block * 8 + 5)]


def test_what_was_evicted_is_gone_and_what_is_left_is_compared(engine, monkeypatch):
    """Also where others have written to the blocks since, with other weights. Only what a running request holds is
    left."""
    parked = engine(hit_check=False)
    parked.taught()
    prompt = tokens(parked.random)
    parked.ended("old", prompt)
    parked.ended("cut", prompt)
    blocks = set(parked.blocks("old", prompt))
    parked.submit("holds", [*prompt[:HIT], *tokens(parked.random, 8)])
    parked.step(5)
    parked.engine.evict()
    assert verdicts(parked.prefixes("cut")) == [("cut", "same", HIT)]
    parked.finish()
    parked.engine.evict()
    weights_change(parked, monkeypatch)
    for n in range(4):
        over = tokens(parked.random)
        parked.ended(f"over {n}", over)
        blocks -= set(parked.blocks(f"over {n}", over))
    assert not blocks
    (gone,) = parked.prefixes("old")
    assert verdicts([gone]) == [("old", "gone", 0)]
    assert f"0 of the {LEFT} tokens that it left in the prefix cache are still there" in gone.reason
    assert told(parked) == []
    assert parked.guard.stats()["recompute_gone"] == 1


def test_who_runs_was_preempted_or_cancelled(engine):
    """A request that will go on is none that ended; a cancelled one left what it had."""
    parked = engine()
    parked.taught()
    for name in ("runs", "stops", "ends"):
        parked.submit(name)
    parked.step(40)
    parked.engine._manager.cancel_request("stops")
    parked.engine.preempt("runs")
    (answer,) = parked.prefixes("runs")
    assert (answer.verdict, answer.parked) == ("unjudged", True)
    assert "it still runs" in answer.reason
    (unknown,) = parked.prefixes("nobody")
    assert "nothing is remembered that it left in the prefix cache" in unknown.reason
    (stopped,) = parked.prefixes("stops")
    assert (stopped.verdict, stopped.tokens >= HIT) == ("same", True)
    parked.finish()
    assert verdicts(parked.prefixes("runs")) == [("runs", "same", LEFT)]


def test_an_idle_engine_proves_what_it_remembers(engine, monkeypatch):
    """Within the share, without being asked, each prefix in its turn; while anybody is served none."""
    parked = engine(recompute="100%", control="off", hit_check=False)
    parked.taught()
    parked.ended("old", tokens(parked.random))
    parked.ended("older", tokens(parked.random))
    served = parked.guard.stats()["recompute_same"]
    before = ledger(parked)
    for _ in range(8):
        parked.step()
    known = parked.verifier._parked.known
    assert all(known.get(name).proven for name in ("old", "older"))
    assert parked.guard.stats()["recompute_same"] > served
    assert parked.guard.violations == []
    assert ledger(parked) == before
    weights_change(parked, monkeypatch)
    parked.engine.submit("serves", tokens(parked.random), 20)
    proofs = known.get("old").proven
    while parked.engine.step():
        assert known.get("old").proven == proofs
    for _ in range(12):
        parked.step()
    assert {v.request for v in parked.guard.violations if v.kind is Kind.RECOMPUTE} >= {"old", "older"}


def test_a_proof_and_running_requests_share_one_budget(engine):
    """Of 1 %: after the one nothing else is computed for long."""
    parked = engine(recompute="1%", control="off")
    parked.ended("old", tokens(parked.random))
    budget = parked.verifier.recompute.budget
    for _ in range(8):
        parked.step()
    assert budget.rests
    known, done = parked.verifier._parked.known.get("old"), parked.guard.stats().get("recompute_ms", 0)
    proven = known.proven
    budget.spent(1000.0)
    parked.submit("runs", tokens(parked.random), 40)
    parked.finish()
    parked.step(4)
    assert (known.proven, parked.guard.stats().get("recompute_ms", 0)) == (proven, done)


def test_clean_traffic_is_never_blamed(engine):
    """Hits, forks, preemptions and evictions, with prefixes verified while others run and afterwards."""
    parked = engine()
    parked.taught()
    answers: list[Verification] = []
    for turn in range(8):
        parked.traffic(1)
        if turn % 3 == 2:
            parked.engine.evict()
        answers += parked.prefixes(None)
        parked.submit("beside", tokens(parked.random), 20)
        parked.step(4)
        answers += parked.prefixes(None)
        parked.finish()
    wrong = [answer.table() for answer in answers if answer.verdict not in ("same", "gone")]
    assert [table for table in wrong if "fewer than 32" not in table and "it still runs" not in table] == []
    counts = Counter(answer.verdict for answer in answers)
    assert (counts["same"] > 40, counts["gone"] > 3) == (True, True), counts
    assert parked.guard.violations == []


def test_a_request_that_comes_in_ends_a_proof(engine, monkeypatch):
    """Before the next forward of it; the prefix is proven later."""
    parked = engine(recompute="100%", control="off")
    parked.taught()
    parked.ended("old", tokens(parked.random))
    comes: list[bool] = []

    def forward(*args: Any) -> None:
        if not comes and not parked.engine._processor.scheduler.has_pending_requests():
            comes.append(True)
            parked.submit("comes", tokens(parked.random), 4)

    monkeypatch.setattr(recompute, "CHUNK_TOKENS", HIT)
    with parked.model.model.rotary_emb.register_forward_hook(forward):
        parked.step()
    assert parked.guard.stats()["recompute_gave_way"] == 1
    parked.finish()
    assert len(parked.engine.answer("comes")) == 4
    parked.step(3)
    assert parked.guard.stats()["recompute_gave_way"] == 1
    assert parked.guard.violations == []


def test_answers_and_the_pool_are_the_same_bit_for_bit(engine):
    """With every prefix computed again in each turn of the loop, and with nothing wrapped at all."""
    answers, pools = [], []
    for verify in (True, False):
        parked = engine(control="write" if verify else "off")
        prompts = [tokens(random.Random(n)) for n in range(3)]
        prompts += [[*prompt[:HIT], *tokens(random.Random(n + 9), 8)] for n, prompt in enumerate(prompts)]
        for n, prompt in enumerate(prompts):
            parked.submit(f"{n}", prompt, 20)
            for _ in range(14):
                if verify and n:
                    parked.verifier.ask(None, parked=True)
                parked.step()
        parked.finish()
        answers.append([list(parked.engine.answer(f"{n}")) for n in range(6)])
        pools.append(parked.engine._cache.cache_tensor.clone())
        assert (parked.guard.stats().get("recomputed_requests", 0) > 4) is verify
        wrapped = {"finish_request", "clear_cancelled_requests"} & set(vars(parked.engine._processor.scheduler))
        assert len(wrapped) == (2 if verify else 0)
        parked.guard.close()
        parked.engine.close()
    assert answers[0] == answers[1]
    assert torch.equal(pools[0], pools[1])


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("llama", {"control": "off"}, "that takes CANARY_CONTROL=write or CANARY_RECOMPUTE when the manager starts"),
        ("gemma3", {}, "layers with a window"),
    ],
)
def test_where_nothing_is_remembered_the_reason_is_said(name, settings, reason, engine):
    """At once, in an engine that serves nobody, of one and of all; nothing is wrapped."""
    parked = engine(name, **settings)
    parked.submit("ended")
    parked.finish()
    for request in ("ended", None):
        with pytest.raises(CanaryError, match=f"what requests leave in the prefix cache is not remembered.*{reason}"):
            parked.verifier.ask(request, parked=True).result(0)
    assert "finish_request" not in vars(parked.engine._processor.scheduler)
    assert not [key for key in parked.guard.stats() if key.startswith("parked")]


def test_who_waits_when_the_manager_ends_is_told(engine):
    """And who asks afterwards."""
    parked = engine()
    parked.ended("a", tokens(parked.random))
    verifier = parked.verifier
    asked = verifier.ask("a", parked=True)
    parked.guard.close()
    for one in (asked, verifier.ask("a", parked=True)):
        with pytest.raises(CanaryError, match="Canary was switched off"):
            one.result(0)
