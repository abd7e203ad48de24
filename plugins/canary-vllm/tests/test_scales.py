"""Scales of quantized KV that change while the engine runs."""

import pytest
import torch
from canary_vllm.compat import runners
from vllm_on_cpu import guarded

from canary_core import Kind

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
PROMPT = [(7 * i) % 400 + 3 for i in range(70)]
WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
QUANTIZED = pytest.param(
    "fp8",
    marks=[pytest.mark.xdist_group("process 1"), pytest.mark.skipif(not WIDE, reason="vLLM wants AVX-512 for FP8 KV")],
)
PLAIN = pytest.param("llama", marks=pytest.mark.xdist_group("process 0"))


def serve(small, name):
    """The prompt once."""
    small.submit(name, PROMPT, 4)
    while small.step():
        pass
    return small.answers[name]


@pytest.mark.parametrize("engine", [QUANTIZED, PLAIN], indirect=True)
def test_a_scale_that_changes_is_told_with_its_layer_and_a_hit_across_it_is_found(engine, monkeypatch):
    """Nobody has emptied the prefix cache: KV of the old scale is read by the new one. Where the CPU has no FP8, KV
    that is not quantized counts as if it were."""
    small = engine.small
    if engine.setup.options.get("kv_cache_dtype") != "fp8":
        monkeypatch.setattr(runners, "quantized", lambda runner: dict(runners.layers(runner)))
    with guarded.guard(small) as guard:
        for name in ("alice", "again"):
            serve(small, name)
        assert guard.trouble() == []
        name, layer = next(iter(small.runner.compilation_config.static_forward_context.items()))
        before = layer._k_scale_float, layer._k_scale.clone()
        try:
            layer._k_scale_float = 4 * before[0]
            layer._k_scale.fill_(4 * before[0])
            serve(small, "bob")
        finally:
            layer._k_scale_float = before[0]
            layer._k_scale.copy_(before[1])
        guard.canary.drain()
        (event,) = [e for e in guard.findings.events if e.name == "scales_changed"]
        assert (event.fields["layer"], event.fields["scale"], event.fields["new"]) == (name, "k_scale", "4")
        (found,) = guard.findings.violations
        assert (found.kind, found.request, found.position) == (Kind.PREFIX, "bob", 0)
        assert f"change 1 (k_scale of {name}: 1 to 4)" in found.identity
        assert found.stored_identity == "the weights of the start"


@pytest.mark.parametrize("engine", [PLAIN], indirect=True)
def test_scales_of_kv_that_is_not_quantized_mean_nothing(engine):
    """vLLM has them all the same, and loads may set them."""
    small = engine.small
    with guarded.guard(small) as guard:
        serve(small, "alice")
        layer = next(iter(small.runner.compilation_config.static_forward_context.values()))
        layer._k_scale.fill_(3)
        try:
            serve(small, "bob")
        finally:
            layer._k_scale.fill_(1)
        assert guard.trouble() == []
