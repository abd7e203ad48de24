"""Copies of the running engine that go wrong, made so in Transformers itself: forks, and what comes back from host
memory. What lies at the destination is judged by what was at the source.

Real on a CPU: all of the engine. Stood in for: pinned memory, of which a CPU has none.
"""

import importlib
import inspect

import pytest
import torch
from tiny.batching import HAS_POOL, Traffic, serve
from tiny.models import batching

from canary_core import Kind, Phase

QUIET = {"read_check": 0, "scrub_budget": "0"}
"""Nothing else compares bytes."""

OFFLOAD = {"pages": 10, "batch_tokens": 32, "requests": 10, "new_tokens": 16, "options": {"cpu_offload_space": 0.01}}
"""Traffic whose requests go to host memory and come back."""

engine = importlib.import_module("transformers.generation.continuous_batching.offloading_manager")
carries = "victims" in inspect.signature(engine.OffloadingManager._offload_to_cpu).parameters


def allocators():
    """The classes of the engine that copy blocks."""
    base = importlib.import_module("transformers.generation.continuous_batching.cache_allocators.cache_allocator")
    return [base.CacheAllocator]


@pytest.fixture
def unpinned(monkeypatch):
    """Host memory that torch can't pin without a GPU."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **more: empty(*sizes, **more))


@pytest.mark.skipif(not HAS_POOL, reason="Transformers 5.17 copies blocks in another way")
def test_a_fork_that_leaves_out_v_of_a_layer(guard, monkeypatch):
    """The engine copies a block for another answer to the same prompt, but not V of layer 1: found at once in each slot
    that has any, with layer and half, and nothing else."""
    (allocator,) = allocators()
    original = allocator.copy_blocks

    def copy(self, source_block_ids, dest_block_ids):
        kept = [self._kv_token_views[layer][1].clone() for layer in self.layer_indices]
        original(self, source_block_ids, dest_block_ids)
        for layer, values in zip(self.layer_indices, kept, strict=True):
            if layer == 1:
                for block in dest_block_ids:
                    rows = slice(block * self.block_physical_stride, block * self.block_physical_stride + 8)
                    self._kv_token_views[layer][1][rows] = values[rows]

    guarded = guard(batching("llama"), **QUIET)
    serve(batching("llama"), Traffic(samples=3, requests=4))
    assert guarded.violations == []
    monkeypatch.setattr(allocator, "copy_blocks", copy)
    serve(batching("llama"), Traffic(samples=3, requests=4, seed=1))
    assert {(v.kind, v.layer, v.half, v.phase) for v in guarded.violations} == {(Kind.BYTES, 1, "v", Phase.EVENT)}
    assert all("copied or loaded to slot" in v.explanation for v in guarded.violations)


@pytest.mark.skipif(not carries, reason="this Transformers offloads in another way: what comes back is not judged")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.usefixtures("unpinned")
def test_what_comes_back_from_host_memory_is_known(kind, guard):
    """Requests that were offloaded go on: nothing is found, and nothing of theirs is unknown."""
    guarded = guard(batching(kind), mode="raise")
    counts = offloads(guarded, kind)
    assert counts["returned"] > 0
    assert guarded.violations == []
    assert guarded.stats()["unknown_slots"] == 0


@pytest.mark.skipif(not carries, reason="this Transformers offloads in another way: what comes back is not judged")
@pytest.mark.usefixtures("unpinned")
def test_a_restore_that_leaves_out_a_layer(guard, monkeypatch):
    """The engine restores a request's blocks, but not K of layer 2: found before the request goes on."""
    guarded = guard(batching("llama"), **QUIET)
    original = engine.OffloadingManager.restore_scheduled_requests

    def restore(self, requests_in_batch, *args):
        allocator = self.cache.layer_to_allocator[2]
        keys = allocator._kv_token_views[2][0]
        kept = keys.clone()
        restored = [f.state.request_id for f in requests_in_batch if f.state.is_cpu_offloaded]
        original(self, requests_in_batch, *args)
        for request in restored:
            for block in allocator.block_table[request]:
                rows = slice(block * allocator.block_physical_stride, block * allocator.block_physical_stride + 8)
                keys[rows] = kept[rows]

    monkeypatch.setattr(engine.OffloadingManager, "restore_scheduled_requests", restore)
    offloads(guarded, "llama")
    assert {(v.kind, v.layer, v.half, v.phase) for v in guarded.violations} == {(Kind.BYTES, 2, "k", Phase.EVENT)}
    assert all(v.stored_request is not None for v in guarded.violations)


def offloads(guarded, kind):
    """Serves `OFFLOAD`; how many requests the engine took back from host memory."""
    counts = {"returned": 0}
    restore = engine.OffloadingManager.restore_scheduled_requests

    def counted(self, requests_in_batch, *args):
        counts["returned"] += sum(f.state.is_cpu_offloaded for f in requests_in_batch)
        return restore(self, requests_in_batch, *args)

    engine.OffloadingManager.restore_scheduled_requests = counted
    try:
        with torch.no_grad():
            serve(batching(kind), Traffic(seed=3, **OFFLOAD))
    finally:
        engine.OffloadingManager.restore_scheduled_requests = restore
    return counts
