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


class LostStore:
    """From forward 24 on, the first store of ``layer`` that has several tokens leaves the tensors as they were."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.slots: list[int] = []
        self._updates = 0

    def make(self, original):
        """For `Patches.wrap`, of `PagedAttentionCache.update`."""

        def update(cache, key_states, value_states, layer_idx, kwargs):
            allocator = cache.layer_to_allocator[layer_idx]
            rows = kwargs["write_index"][allocator.index]
            self._updates += layer_idx == self._layer
            if layer_idx != self._layer or self._updates < 24 or len(rows) < 6 or self.slots:
                return original(cache, key_states, value_states, layer_idx, kwargs)
            tensors = allocator._kv_token_views[layer_idx]
            before = [tensor[rows].clone() for tensor in tensors]
            result = original(cache, key_states, value_states, layer_idx, kwargs)
            for tensor, kept in zip(tensors, before, strict=True):
                tensor[rows] = kept
            stride, page = allocator.block_physical_stride, allocator.tokens_per_page
            self.slots = [row // stride * page + row % stride for row in rows.tolist()]
            return result

        return update


@pytest.mark.skipif(not HAS_POOL, reason="the cache's tensors have other names up to 5.17")
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_store_that_never_comes_is_told_also_in_a_block_that_another_type_of_layers_had(layer, guard):
    """Full and sliding layers take turns on the same memory. A token that its slot has had before is not judged: to
    store it again may change nothing."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    lost, patches = LostStore(layer), Patches()
    patches.wrap(PagedAttentionCache, "update", lost.make)
    try:
        guarded = guard(batching("gemma3"), store_check=True)
        serve(batching("gemma3"), Traffic(**TIGHT))
    finally:
        patches.undo()
    found = [(v.slot, v.half) for v in guarded.violations if v.kind is Kind.LOST_WRITE and v.layer == layer]
    told = {(slot, half) for slot in lost.slots for half in "kv"}
    assert len(told) >= 12
    assert set(found) <= told
    assert len(found) > len(told) - 4
