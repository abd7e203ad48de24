"""The conformance suite that every plugin must pass, on real vLLM on a CPU, with the V1 runner."""

from functools import cache

import pytest
from canary_vllm import plugin

from canary_core.testing import EngineSession, PluginConformance

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("process 0")]


@cache
def engine(model: str):
    """One of `vllm_on_cpu.models.MODELS`, loaded once."""
    from vllm_on_cpu.engine import SmallEngine

    return SmallEngine(model)


class TestLlama(PluginConformance):
    """Not declared: a batch that no CUDA graph replays is not padded (`padding`); vLLM forks no requests, and rolls
    back only what was drafted (`fork`, `roll_back`)."""

    plugin = plugin
    layers, halves = 2, ("k", "v")
    abilities = frozenset(
        {
            "slot_mapping",
            "lifetime",
            "prefix_cache",
            "park",
            "evict",
            "preempt",
            "raise",
            "uninstall",
            "token_ids",
            "positions",
            "lengths",
            "tables",
            "names",
            "sampled",
            "identities",
            "weights",
            "read_tables",
            "stores",
        }
    )
    engine_package = "vllm.v1"
    longest_prompt = 100

    def session(self) -> EngineSession:
        """A new KV cache and a new scheduler."""
        from vllm_on_cpu.session import VLLMSession

        return VLLMSession(engine("llama"))
