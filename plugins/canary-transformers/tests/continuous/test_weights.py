"""Weights that change under a running manager: running requests, their forks and preempted ones are never blamed."""

import importlib

import pytest
import torch
from canary_transformers.continuous.batch import ContinuousBatch
from tiny.batching import Traffic, serve
from tiny.models import batching

SHAPES = {
    "plain": {"options": {"allow_block_sharing": False}},
    "forks": {"options": {"allow_block_sharing": False}, "samples": 3, "requests": 4},
    "preempted": {
        "options": {"allow_block_sharing": False}, "pages": 10, "batch_tokens": 32, "requests": 10, "new_tokens": 16,
    },
}  # fmt: skip


@pytest.fixture
def trained(monkeypatch):
    """After each batch the model's weights are others, as in reinforcement learning that waits for nobody."""
    api = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    model, update = batching("llama"), api.ContinuousBatchProcessor.update_batch
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}

    def after(self, *args, **kwargs):
        result = update(self, *args, **kwargs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
        return result

    monkeypatch.setattr(api.ContinuousBatchProcessor, "update_batch", after)
    yield model
    model.load_state_dict(kept)


@pytest.mark.parametrize("shape", SHAPES)
def test_running_requests_are_never_blamed(shape, trained, guard):
    """No block is shared across a change, so there is nothing to find; the changes are counted."""
    guarded = guard(trained)
    serve(trained, Traffic(seed=2, **SHAPES[shape]))
    stats = guarded.stats()
    assert guarded.violations == []
    assert stats["weights_changed"] > 0
    assert stats["unknown_slots"] == 0


def test_hits_across_changes_are_told_and_nothing_else_is(trained, guard):
    """With blocks shared: each finding names the older weights of its slot, and a request that began after them."""
    guarded = guard(trained)
    serve(trained, Traffic(seed=2))
    assert guarded.violations
    for found in guarded.violations:
        assert found.kind.name == "PREFIX"
        assert found.identity.startswith("the weights of change")
        assert found.stored_identity.startswith("the weights of ")


def test_a_request_is_looked_at_twice(monkeypatch, guard):
    """When it begins, and after its first forward; decodes look at nothing."""
    looked = []
    begins = ContinuousBatch._notice_reused_names
    from canary_adapters import WatchedWeights

    look = WatchedWeights.look
    monkeypatch.setattr(WatchedWeights, "look", lambda self: looked.append(1) or look(self))
    fresh = []
    monkeypatch.setattr(
        ContinuousBatch,
        "_notice_reused_names",
        lambda self, states: (
            fresh.append(sum(self._states.get(state.request_id) is not state for state in states)),
            begins(self, states),
        )[1],
    )
    guarded = guard(batching("llama"))
    serve(batching("llama"), Traffic(seed=1, requests=3))
    with_fresh = sum(map(bool, fresh))
    assert guarded.stats()["forwards"] > 2 * with_fresh > 0
    assert len(looked) <= 2 * with_fresh
