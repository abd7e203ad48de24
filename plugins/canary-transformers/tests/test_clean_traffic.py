"""Without a fault: not one finding, and the very same outputs."""

import importlib

import pytest

from canary_core.hookspecs import hookimpl

KINDS = ["llama", "mistral", "qwen3", "gemma3"]

SHAPES = {
    "plain": {},
    "samples": {"samples": 3, "requests": 4},
    "tight": {"pages": 10, "batch_tokens": 32, "requests": 10, "new_tokens": 16},
    "no_sharing": {"options": {"allow_block_sharing": False}},
    "prefill_first": {"options": {"scheduler_type": "prefill_first"}},
    "tight_samples": {"samples": 3, "requests": 4, "pages": 14, "batch_tokens": 32},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_clean_traffic_raises_no_alarm_and_keeps_its_outputs(kind, shape, build, serve, guard, traffic, has_pool):
    """Prefix sharing, chunked prefill, forks, eviction, preemption, windows, in every attention type."""
    load = traffic(seed=len(shape), **SHAPES[shape])
    bare = serve(build(kind), load)
    guarded = guard(build(kind), mode="raise")
    assert serve(build(kind), load) == bare
    stats = guarded.stats()
    assert guarded.violations == []
    assert stats["violations"] == stats["unknown_slots"] == 0
    assert stats["dismissed"] == 0 or not has_pool
    assert min(stats[name] for name in ("forwards", "checked_slots", "recorded_slots", "checked_bytes")) > 0


@pytest.mark.parametrize("seed", range(10))
def test_no_alarm_under_pressure_whatever_the_seed(seed, build, serve, guard, traffic):
    """Ten seeds of the load that moves blocks most, on the model with both regions."""
    load = traffic(seed=seed, pages=12, batch_tokens=24, requests=9, new_tokens=14, samples=1 + seed % 2)
    guarded = guard(build("gemma3" if seed % 2 else "llama"))
    serve(build("gemma3" if seed % 2 else "llama"), load)
    assert guarded.violations == []
    assert guarded.stats()["forwards"] > 10


def test_the_loads_do_what_they_are_for(build, serve, guard, traffic, monkeypatch):
    """Prefixes are shared, blocks evicted and copied, requests preempted: else silence proves nothing."""
    cache = importlib.import_module("transformers.generation.continuous_batching.cache")
    state = importlib.import_module("transformers.generation.continuous_batching.requests").RequestState
    seen = set()

    def spy(owner, name, what):
        original = getattr(owner, name)

        def wrapper(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            if result or what == "copied":
                seen.add(what)
            return result

        monkeypatch.setattr(owner, name, wrapper)

    spy(cache.PagedAttentionCache, "search_prefix_match", "shared")
    spy(state, "create_equivalent_initial_request", "preempted")
    if hasattr(cache.PagedAttentionCache, "copy_cache"):
        spy(cache.PagedAttentionCache, "copy_cache", "copied")
    else:
        spy(cache.PagedAttentionCache, "perform_cache_copy", "copied")
        spy(cache.PagedAttentionCache, "evict_cached_blocks", "evicted")
    guarded = guard(build("llama"))
    for shape in ("tight", "tight_samples"):
        serve(build("llama"), traffic(seed=3, **SHAPES[shape]))
    assert guarded.violations == []
    assert seen >= {"shared", "preempted", "copied"}


def test_every_byte_of_the_cache_is_covered(build, serve, guard, traffic):
    """All layers, both halves, and no region leaves anything out."""
    regions, uncovered = {}, []

    class Look:
        @hookimpl
        def canary_attached(self, canary):
            regions.update(canary.regions)
            uncovered.extend(canary.uncovered)

    guarded = guard(build("gemma3"))
    guarded.register(Look())
    serve(build("gemma3"), traffic())
    assert uncovered == []
    names = {f"{source.half}.{source.layer}" for region in regions.values() for source in region.sources}
    assert names == {f"{half}.{layer}" for half in "kv" for layer in range(4)}
    windows = {source.layer for r in regions.values() if r.window_tokens for source in r.sources}
    assert windows == {0, 2, 3}
