"""Requests computed again whose KV is stored in fp8: clean ones are never told, broken ones are, by their KV alone."""

import pytest
import torch
from canary_vllm.hooks import HOOKS
from vllm_on_cpu import guarded, scripts, setups, verified

from canary_core import Kind

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("process 0")]
QUIET = dict(read_check=0, scrub_budget="0", bytes="off")
"""All checks of bytes are off."""
E5M2 = pytest.mark.takes_turns("the same with the other type of fp8", unit="recompute in e5m2")
LACKING = setups.lacking("fp8")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("fp8_e4m3", "float32"), id="fp8_e4m3-float32"),
        pytest.param(("fp8_e5m2", "bfloat16"), id="fp8_e5m2-bfloat16", marks=E5M2),
    ],
)
def small(request):
    """An engine with weights that matter."""
    if LACKING is not None:
        pytest.skip(LACKING)
    from vllm_on_cpu.engine import SmallEngine

    stored, computed = request.param
    options = dict(num_gpu_blocks_override=48, max_num_seqs=12, kv_cache_dtype=stored, dtype=computed)
    return SmallEngine(verified.weighty(), load_format="auto", **options)


def told(guard):
    """Layer, position, request and rule of each finding of a recompute."""
    guard.canary.drain()
    found = [v for v in guard.findings.violations if v.kind is Kind.RECOMPUTE]
    return [(v.layer, v.position, v.request, v.rule) for v in found]


def test_clean_traffic_is_well_and_answers_stay_the_same(small):
    """Hits and chunks."""
    small.renew()
    plain = guarded.traffic(small, 4, new_tokens=40)
    with guarded.guard(small, **QUIET, recompute="100%") as guard:
        assert guarded.traffic(small, 4, new_tokens=40) == plain
        (session,) = HOOKS.sessions
        assert len(session.recomputed.answers) > 15
        assert {answer.verdict for answer in session.recomputed.answers} == {"same"}
        assert told(guard) == []


def test_weights_that_changed_under_a_kept_cache_are_told_at_a_hit(small):
    """The KV of a hit is not what the weights of now compute; a request that hits nothing is well."""
    with guarded.guard(small, **QUIET) as guard:
        hits, fresh = verified.hit_under_other_weights(small)
        assert (hits.verdict, fresh.verdict) == ("differs", "same")
        ((layer, position, request, rule),) = told(guard)
        # In the first token few numbers may be in another step.
        assert (layer, request, rule) == (1, "hits", "brought")
        assert position < 4


def test_a_length_too_short_in_decode_is_told_where_the_decode_begins(small):
    """Layer 0 is right, and so is the prompt. One token of 32-bit floats is told; in 16 bits a few steps of e5m2 are as
    large."""
    prompt, missing = verified.prompt("short"), 1 if small.runner.model_config.dtype is torch.float32 else 16
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        with verified.short_decodes(small, "ill", missing):
            verified.begin(small, verified.DECODED, {"ill": prompt, "well": prompt[::-1]})
        answers = verified.verify(small, "ill", "well")
        verified.finish(small)
        assert [one.verdict for one in answers] == ["differs", "same"]
        ((layer, position, request, rule),) = told(guard)
        assert (layer, request, rule) == (1, "ill", "attention")
        assert len(prompt) <= position < len(prompt) + 8


def test_a_scale_that_changed_under_a_kept_cache_is_told_at_a_hit(small):
    """Bytes written under the old scale are read under the new one; nothing else is wrong."""
    prompt = verified.prompt("scale")
    layer = list(small.runner.compilation_config.static_forward_context.values())[1]
    before = layer._k_scale_float, layer._k_scale.clone()
    with guarded.guard(small, **QUIET) as guard:
        verified.teach(small)
        verified.begin(small, 2, {"before": prompt})
        verified.finish(small)
        try:
            layer._k_scale_float = 1.5 * before[0]
            layer._k_scale.fill_(layer._k_scale_float)
            verified.begin(small, 2, {"hits": prompt, "fresh": verified.prompt("fresh")})
            hits, fresh = verified.verify(small, "hits", "fresh")
            verified.finish(small)
        finally:
            layer._k_scale_float = before[0]
            layer._k_scale.copy_(before[1])
        assert (hits.verdict, fresh.verdict) == ("differs", "same")
        assert told(guard) == [(1, 0, "hits", "brought")]
        off = {one.source.split("/")[0] for one in hits.layers if one.layer == 1 and one.differs}
        assert off == {"k.1"}
        assert max(one.worst for one in hits.layers if one.layer == 1) == pytest.approx(0.5, abs=0.05)


@pytest.mark.takes_turns("nothing: it looks at what vLLM stores, which changes with a release of vLLM")
def test_scales_of_single_tokens_and_heads_are_read_where_vllm_stores_them():
    """By the store of vLLM's Triton backend, which in the interpreter is the whole of it: numbers come back but for one
    rounding."""
    done = scripts.told_by("scaled_script", TRITON_INTERPRET="1")
    assert max(done["int8_per_token_head"].values()) < 0.01
    # The interpreter cuts fp8 off, where a GPU rounds.
    assert max(done["fp8_per_token_head"].values()) < 0.07
