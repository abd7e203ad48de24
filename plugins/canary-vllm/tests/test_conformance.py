"""The conformance suite that every plugin must pass, on real vLLM on a CPU, with the V1 runner."""

from collections.abc import Mapping
from functools import cache

import pytest
from canary_vllm import plugin

from canary_core.testing import Ability, EngineSession, PluginConformance

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("process 0")]


@cache
def engine(model: str):
    """One of `vllm_on_cpu.models.MODELS`, loaded once."""
    from vllm_on_cpu.engine import SmallEngine

    return SmallEngine(model)


class TestLlama(PluginConformance):
    """Every test is inherited."""

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
    lacking: Mapping[Ability, str] = {
        "padding": "a batch that no CUDA graph replays is not padded, and a CPU has no graphs",
        "graphs": "a CPU has no CUDA graphs",
        "fork": "vLLM runs each of several answers as a request of its own",
        "copies": "vLLM forks no requests",
        "contents": "the suite's engine takes tokens only; canary-vllm's test_contents has embeddings and images",
        "roll_back": "vLLM rolls back only what was drafted",
    }
    engine_package = "vllm.v1"
    longest_prompt = 100

    def session(self) -> EngineSession:
        """A new KV cache and a new scheduler."""
        from vllm_on_cpu.session import VLLMSession

        return VLLMSession(engine("llama"))
