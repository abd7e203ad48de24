"""Continuous batching is hooked and let go of again, and a finding in raise mode reaches who waits for it."""

import importlib

import canary_transformers
import pytest
import torch
from tiny.batching import Traffic, serve
from tiny.models import batching

from canary_core import Canary, Kind, Phase, Violation, ViolationError, hookimpl

PATCHED = {
    "ContinuousBatchingManager": ["_create_batch_processor", "_generation_step", "stop"],
    "ContinuousMixin": ["continuous_batching_context_manager"],
}
LATE = Violation(Kind.BYTES, "full_attention", Phase.SCRUB, 1, 0, 0, source="k.0", layer=0, half="k")


def patched():
    """The engine's functions that we wrap, as they are now."""
    api = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    return {f"{owner}.{name}": vars(getattr(api, owner))[name] for owner, names in PATCHED.items() for name in names}


class Flip:
    """Flips a bit of every slot in use, once: a finding for sure."""

    def __init__(self, step):
        self.step = step

    @hookimpl
    def canary_pre_forward(self, canary, batch):
        if canary.forwards == self.step:
            for region in canary.regions.values():
                region.sources[0].tensor.view(torch.uint8).view(-1)[::16] ^= 1


def test_close_leaves_the_engine_as_it_was():
    """Classes and objects; twice is harmless; several guards come and go in any order."""
    before = patched()
    first = canary_transformers.guard(batching("llama"))
    second = canary_transformers.guard(batching("qwen3"))
    assert all(patched()[name] is not original for name, original in before.items())
    serve(batching("llama"), Traffic(requests=2))
    first.close()
    first.close()
    assert all(patched()[name] is not original for name, original in before.items())
    second.close()
    assert patched() == before
    assert first.stats()["forwards"] > 0
    assert second.stats()["forwards"] == 0


def test_mode_off_touches_nothing():
    """Not even the engine's classes."""
    before = patched()
    with canary_transformers.guard(batching("llama"), mode="off"):
        assert patched() == before


def test_a_finding_reaches_the_caller_in_raise_mode(guard):
    """The loop runs in a thread of its own, and can only fail requests; `generate_batch` raises."""
    guarded = guard(batching("llama"), mode="raise")
    guarded.register(Flip(step=6))
    with pytest.raises(ViolationError, match="changed since") as caught:
        serve(batching("llama"), Traffic())
    assert caught.value.violation.kind is Kind.BYTES
    assert caught.value.violation is caught.value.incident.root
    assert caught.value.violation in guarded.violations
    guarded.close()
    serve(batching("llama"), Traffic())


def test_a_finding_that_only_the_end_brings_reaches_the_caller_too(guard, monkeypatch):
    """Findings are read late; what the last read brings is raised at the end of the context."""
    model, load = batching("llama"), Traffic()

    def drain(canary):
        raise ViolationError(LATE)

    def serve_one():
        with model.continuous_batching_context_manager(**load.settings(model)) as manager:
            manager.add_request([5, 6, 7], max_new_tokens=2)
            while manager.get_result(timeout=1) is None:
                pass
            monkeypatch.setattr(Canary, "drain", drain)

    guard(model, mode="raise")
    with pytest.raises(ViolationError, match="flipped bit"):
        serve_one()
