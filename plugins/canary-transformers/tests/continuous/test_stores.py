"""Continuous batching: what a layer stores is still there when the forward has ended."""

import pytest
from tiny.batching import HAS_POOL, Traffic, serve
from tiny.models import batching

from canary_core import Kind, Patches
from canary_core.records import Phase

TIGHT = {"pages": 12, "batch_tokens": 24, "requests": 9, "new_tokens": 14}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_stores_of_all_layers_are_looked_at_and_found_right(kind, guard):
    """Prefix sharing, forks, eviction, preemption and windows."""
    model = batching(kind)
    guarded = guard(model, store_check=True)
    serve(model, Traffic(**TIGHT, samples=2))
    stats = guarded.stats()
    assert guarded.violations == []
    assert stats["noted_stores"] == stats["forwards"] * model.config.num_hidden_layers > 10


@pytest.mark.skipif(not HAS_POOL, reason="the cache's tensors have other names up to 5.17")
def test_a_stray_write_between_a_store_and_the_end_of_the_forward_is_told(guard):
    """The store of layer 1 also changes what layer 0 has just stored: told with layer, half and phase, at once."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    model, done = batching("llama"), []

    def make(original):
        def update(cache, key_states, value_states, layer_idx, kwargs):
            result = original(cache, key_states, value_states, layer_idx, kwargs)
            if layer_idx == 1 and len(kwargs["write_index"][0]) and not done:
                allocator = cache.layer_to_allocator[0]
                slot = kwargs["write_index"][allocator.index][0]
                allocator._kv_token_views[0][1][slot] += 1
                done.append(slot)
            return result

        return update

    patches = Patches()
    patches.wrap(PagedAttentionCache, "update", make)
    try:
        guarded = guard(model, store_check=True)
        serve(model, Traffic(pages=24, requests=2, new_tokens=4))
    finally:
        patches.undo()
    found = guarded.violations
    assert done
    assert [(v.kind, v.phase, v.source, v.step) for v in found] == [(Kind.BYTES, Phase.POST_FORWARD, "v.0", 1)]
    assert "changed between the store of layer 0 and the end of the forward" in found[0].explanation
