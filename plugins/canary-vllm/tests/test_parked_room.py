"""Proofs of an idle engine whose pool is full of the prefix cache: they take a hundredth of it, and no more."""

import pytest
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded, parked, verified
from vllm_on_cpu.engine import BLOCK, SmallEngine

from canary_adapters import recompute_requests
from canary_core import recomputer

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]
PROVES = dict(read_check=0, scrub_budget="0", bytes="off", control="write", recompute="100%")
WEIGHT = "model.layers.0.post_attention_layernorm.weight"
BLOCKS = 600
MOST = BLOCKS // 100
LENGTH = 4 * BLOCK
"""Tokens that each request leaves: whole blocks, so that none is without a key."""


@pytest.fixture(scope="module")
def large():
    """An engine with a pool of which a hundredth is enough for a short prefix, in float32."""
    options = dict(load_format="auto", num_gpu_blocks_override=BLOCKS, max_num_seqs=12, async_scheduling=True)
    return SmallEngine(verified.weighty(), **options)


def fill(engine, requests=BLOCKS // 4 + 1):
    """All free blocks have keys of the prefix cache."""
    prompts = [verified.prompt(f"full {n}", LENGTH - 7) for n in range(requests)]
    outputs = engine.serve(prompts, 8, "full")
    assert len(parked.queue(engine)) == engine.pool.get_num_free_blocks() == BLOCKS - 1
    return prompts, outputs


def prove(engine, proofs):
    """So many proofs of an idle engine, without the rests: in every second turn it begins to rest. At other times
    nothing is computed again."""
    (session,) = HOOKS.sessions
    recomputes = parked.requests(engine)._recomputes
    session.recomputed.answers.clear()
    recomputes._share = 1.0
    for _ in range(2 * proofs):
        recomputes._proofs._rest_until = 0.0
        parked.idle(engine)
    recomputes._share = 0.0
    return [(one.request, one.verdict) for one in session.recomputed.answers if one.parked]


def later(engine, prompts):
    """Requests that hit what the last ones left, and new ones. Their answers, and the keys of the cache afterwards."""
    again = [[*one[:96], *verified.prompt(f"later {n}", 40)] for n, one in enumerate(prompts[-6:])]
    return engine.serve(again, 8, "later"), [key for _, key in parked.queue(engine)]


def test_a_full_cache_is_proven_with_a_hundredth_of_it(large):
    """One prefix after the other, in blocks that the next request would have taken; it finds the cache as without
    Canary. A prefix of other weights is told."""
    large.renew()
    prompts, outputs = fill(large)
    plain = later(large, prompts)
    with guarded.guard(large, **PROVES) as guard:
        verified.teach(large)
        prove(large, 0)
        assert fill(large) == (prompts, outputs)
        before = parked.queue(large)
        done = prove(large, 40)
        assert len(done) == 40 == len({name for name, _ in done})
        assert {verdict for _, verdict in done} == {"same"}
        after = parked.queue(large)
        gone = len(before) - len(after)
        assert after == before[gone:]
        assert 0 < gone <= MOST
        assert later(large, prompts) == plain
        assert guard.canary.stats()["parked_evicted"] == gone
        prove(large, 3)
        with verified.scaled(large, WEIGHT, 1.05):
            assert [verdict for _, verdict in prove(large, 3)] == ["differs"] * 3
        assert len(guard.findings.violations) == 3


def test_what_takes_more_is_not_proven_and_that_is_said(large, monkeypatch):
    """A prefix longer than a hundredth of the pool, or one that would go itself: nothing is evicted for it, a counter
    and an event tell, and others are proven."""
    monkeypatch.setattr(recomputer, "STARVED_LOOKS", 5)
    with guarded.guard(large, **PROVES) as guard:
        parked.serve(large, "itself", verified.prompt("itself", LENGTH - 7))
        parked.serve(large, "long", verified.prompt("long", 7 * BLOCK - 7))
        others = {f"full {n}": verified.prompt(f"other {n}", LENGTH - 7) for n in range(BLOCKS // 4 - 3)}
        for name, tokens in others.items():
            parked.serve(large, name, tokens)
        assert parked.remembered(large).get("itself").left() == LENGTH
        before = parked.queue(large)
        done = prove(large, 10)
        assert [name for name, _ in done] == [f"full {n}" for n in range(10)]
        gone = len(before) - len(parked.queue(large))
        assert gone <= MOST
        parked.serve(large, "counts", verified.prompt("counts", 40))
        assert guard.canary.stats()["parked_no_room"] >= 10
        told = [event.fields["reason"] for event in guard.findings.told("recompute_starved")]
        assert told.count(recompute_requests.NO_CHOICE["parked_no_room"]) == 1
        assert guard.findings.violations == []
