"""Recurrent states: short convolutions and Mamba, alone and beside attention. Gated delta nets,
and states that the prefix cache keeps: `test_processes`."""

from functools import cache

import pytest
from vllm_on_cpu import guarded, verified

from canary_core import Kind, RegionKind

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]

STATES = {
    "mamba2": {0: ("conv", "ssm"), 1: ("conv", "ssm")},
    "falcon_h1": {2: ("conv", "ssm"), 3: ("conv", "ssm")},
    "lfm2": {0: ("conv",), 2: ("conv",)},
}
"""By model: layers that have states, and the halves of one."""
BESIDE = "the same with another of these models"
MODELS = pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.takes_turns(BESIDE, unit=f"states of {name}")) for name in STATES]
)


@cache
def engine(model: str, cached: bool = False):
    """So few blocks that requests are preempted."""
    from vllm_on_cpu.engine import SmallEngine

    return SmallEngine(model, enable_prefix_caching=cached, num_gpu_blocks_override=14)


def regions(canary):
    """Those of states: layer and half of each source."""
    states = [region for region in canary.regions.values() if region.kind is RegionKind.STATE]
    return sorted((source.layer, source.half) for region in states for source in region.sources)


@MODELS
def test_clean_traffic_is_silent_and_answers_stay_the_same(model):
    """Chunked prefill, mixed batches, preemption, and blocks that held another request's state or KV before: no
    finding, every byte that forwards change is claimed, and all states are guarded."""
    small = engine(model)
    small.renew()
    plain = guarded.traffic(small, 2)
    with guarded.guard(small, audit=16, state_interval=1) as guard:
        answers = guarded.traffic(small, 2)
        assert guard.trouble() == []
        stats, known = guard.canary.stats(), regions(guard.canary)
        (audit,) = guard.findings.told("audit")
        (coverage,) = guard.findings.told("coverage")
    assert answers == plain
    assert known == sorted((layer, half) for layer, halves in STATES[model].items() for half in halves)
    assert coverage.fields["coverage_ratio"] == 1.0
    assert audit.fields["unclaimed_bytes"] == 0
    assert stats["forwards"] > 30
    assert stats["checked_bytes"] > 1000


@MODELS
def test_a_flipped_bit_of_a_state_is_named(model):
    """A bit that is flipped in a running request's state, by vLLM's own tables, is told with layer, half and request,
    and nothing else is."""
    small = engine(model)
    with guarded.guard(small, state_interval=1) as guard:
        for layer, half in ((layer, half) for layer, halves in STATES[model].items() for half in halves):
            name = f"{layer} {half}"
            small.submit(name, guarded.prompts(name)[0], 12)
            small.submit(f"other {name}", guarded.prompts(name)[1], 12)
            while len(small.answers[name]) < 3:
                small.step()
            before = len(guard.findings.violations)
            small.poke_state(layer, half, name)
            while small.step():
                pass
            guard.canary.drain()
            found = guard.findings.violations[before:]
            assert {(v.kind, v.layer, v.half, v.stored_request) for v in found} == {(Kind.BYTES, layer, half, name)}


@MODELS
def test_states_that_two_requests_exchange_are_found(model):
    """Two rows of the block table of states change places, as when a runner reorders its batch and not its tables: the
    state is another request's, which its prefix says."""
    small = engine(model)
    number = next(
        i
        for i, group in enumerate(small.runner.kv_cache_config.kv_cache_groups)
        if type(group.kv_cache_spec).__name__ == "MambaSpec"
    )
    with guarded.guard(small, read_check=0) as guard:
        small.submit("a", list(range(5, 20)), 12)
        small.submit("b", list(range(60, 75)), 12)
        while len(small.answers["b"]) < 3:
            small.step()
        assert guard.trouble() == []
        table = small.runner.input_batch.block_table[number]
        table.block_table.np[:2] = table.block_table.np[:2][::-1].copy()
        small.step()
        guard.canary.drain()
        found = guard.findings.violations
    assert {v.kind for v in found} & {Kind.PREFIX, Kind.TOKEN, Kind.POSITION}
    assert {v.region for v in found} == {"state"}


def test_states_are_computed_again_beside_kv():
    """In a model with both; the request ends as it would. See `test_state_recompute`."""
    small = engine("falcon_h1")
    with guarded.guard(small, state_interval=1) as guard:
        verified.begin(small, verified.DECODED, {"beside": verified.prompt("beside", 30)})
        (answer,) = verified.verify(small, "beside")
        small.core.abort_requests(["beside"])
        verified.finish(small)
        assert {one.region for one in answer.layers} == {"full", "state"}
        assert answer.uncompared == []
        guard.canary.drain()
        assert guard.findings.violations == []


def test_states_that_a_prefills_kernels_store_are_left_out_with_the_reason():
    """Where vLLM's kernels store a prompt's states for the prefix cache, the states are named in the coverage event,
    and the KV is guarded."""
    with guarded.guard(engine("falcon_h1", cached=True)) as guard:
        assert list(guard.canary.regions) == ["full"]
        (coverage,) = guard.findings.told("coverage")
    assert {item["name"] for item in coverage.fields["uncovered"]} == {"model.2.mixer", "model.3.mixer"}
    assert "a prefill's kernels store" in str(coverage.fields["uncovered"])
