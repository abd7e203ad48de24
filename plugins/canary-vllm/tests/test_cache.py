"""The prefix cache's structure, and what is done about a corrupted block. Engines that are shared with test_engine."""

import pytest
from vllm_on_cpu import guarded

from canary_core import Canary, Kind

pytestmark = pytest.mark.timeout(600)
LLAMA = pytest.param("llama", marks=pytest.mark.xdist_group("process 0"))
ONLY = pytest.mark.parametrize("engine", [LLAMA], indirect=True)


def break_ref(pool, block):
    """A count that was lowered once too often."""
    block.ref_cnt -= 1


def break_hash(pool, block):
    """A block that was evicted, and is still found."""
    block.reset_hash()


def break_free(pool, block):
    """A block in use that is in the free list."""
    pool.free_block_queue.append(block)


@ONLY
@pytest.mark.parametrize(
    ("damage", "rule"), [(break_ref, "ref_low"), (break_hash, "hash_stale"), (break_free, "in_use_free")]
)
def test_a_broken_block_pool_is_told(engine, damage, rule):
    """A sweep is silent until vLLM's pool contradicts itself; then the rule and the block are named."""
    small = engine.small
    with guarded.guard(small, sweep_interval=1, read_check=0) as guard:
        guarded.traffic(small, 2)
        assert guard.trouble() == []
        small.submit("broken", guarded.prompts("broken")[0] + list(range(3, 70)), 30)
        while len(small.answers["broken"]) < 3:
            small.step()
        block = small.pool.blocks[small.blocks("broken")[0][0]]
        damage(small.pool, block)
        small.step()
        guard.canary.drain()
        found = {(v.kind, v.rule, v.node) for v in guard.findings.violations}
        assert (Kind.CACHE_STRUCTURE, rule, block.block_id) in found
        assert guard.canary.stats()["sweeps"] > 10


@ONLY
def test_a_corrupted_request_is_computed_again(engine):
    """Quarantine: the block leaves the prefix cache, the request that has it is computed again and ends, what it reads
    then is right, and other requests are as without Canary."""
    small = engine.small
    prompt, other = guarded.prompts("quarantine", 2)
    prompt = prompt + list(range(3, 70))
    small.renew()
    plain = small.serve([other], 30)
    with guarded.guard(small, on_violation="quarantine") as guard:
        small.submit("ill", prompt, 30)
        small.submit("well", other, 30)
        while len(small.answers["ill"]) < 3:
            small.step()
        spoiled = small.blocks("ill")[0][0]
        small.poke(1, "k", "ill", 5)
        while small.step():
            pass
        guard.canary.drain()
        (event,) = guard.findings.told("quarantined")
        assert (event.fields["block"], event.fields["evicted"]) == (spoiled, 1)
        assert [event.fields["request"] for event in guard.findings.told("recomputed")] == ["ill"]
        assert len(small.answers["ill"]) == 30
        assert small.answers["well"] == plain[0]
        assert [v.kind for v in guard.findings.violations] == [Kind.BYTES]
        assert small.serve([prompt], 4, "after")[0]
        guard.canary.drain()
        assert len(guard.findings.violations) == 1


@ONLY
@pytest.mark.parametrize("eager", [True, False])
def test_only_a_start_that_captures_graphs_has_something_compiled_beside(engine, monkeypatch, eager):
    """Another one would wait for the compiler at once."""
    asked = []
    monkeypatch.setattr(Canary, "warm_up", lambda canary, batches, most_rows, *, beside=False: asked.append(beside))
    monkeypatch.setitem(vars(engine.small.runner.vllm_config.model_config), "enforce_eager", eager)
    with guarded.guard(engine.small):
        assert asked == [not eager]
