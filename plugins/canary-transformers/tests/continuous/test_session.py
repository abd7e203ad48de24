"""Continuous batching without a fault: not one finding and the very same outputs, whatever happens to its cache."""

import importlib

import pytest
from canary_transformers.continuous.batch import ContinuousBatch
from canary_transformers.continuous.session import Session
from tiny.batching import HAS_POOL, Traffic, serve
from tiny.models import batching

from canary_core import hookimpl
from canary_core.testing import Findings

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
def test_clean_traffic_raises_no_alarm_and_keeps_its_outputs(kind, shape, guard):
    """Prefix sharing, chunked prefill, forks, eviction, preemption, windows, in every attention type."""
    load = Traffic(seed=len(shape), **SHAPES[shape])
    bare = serve(batching(kind), load)
    guarded = guard(batching(kind), mode="raise")
    assert serve(batching(kind), load) == bare
    stats = guarded.stats()
    assert guarded.violations == []
    assert stats["violations"] == stats["unknown_slots"] == 0
    assert stats["dismissed"] == 0 or not HAS_POOL
    assert min(stats[name] for name in ("forwards", "checked_slots", "recorded_slots", "checked_bytes")) > 0


@pytest.mark.takes_turns("other seeds, and clean traffic of all shapes above")
@pytest.mark.parametrize("seed", range(10))
def test_no_alarm_under_pressure_whatever_the_seed(seed, guard):
    """Ten seeds of the load that moves blocks most, on the model with both regions."""
    load = Traffic(seed=seed, pages=12, batch_tokens=24, requests=9, new_tokens=14, samples=1 + seed % 2)
    guarded = guard(batching("gemma3" if seed % 2 else "llama"))
    serve(batching("gemma3" if seed % 2 else "llama"), load)
    assert guarded.violations == []
    assert guarded.stats()["forwards"] > 10


def test_the_loads_do_what_they_are_for(guard, monkeypatch):
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
    guarded = guard(batching("llama"))
    for shape in ("tight", "tight_samples"):
        serve(batching("llama"), Traffic(seed=3, **SHAPES[shape]))
    assert guarded.violations == []
    assert seen >= {"shared", "preempted", "copied"}


def test_blocks_are_parked_shared_and_evicted_by_this_traffic(guard, monkeypatch):
    """What the engine does with its cache reaches Canary, request by request where one is known: the silence of the
    other tests is not for want of events."""
    if not HAS_POOL:
        pytest.skip("Transformers 5.17 tells when blocks are handed out, not when they are cached")
    told = {}
    original = Session.changed_hands

    def changed_hands(self, event, group, blocks, request=None):
        if blocks:
            told.setdefault(event, set()).add(request is not None)
        original(self, event, group, blocks, request)

    monkeypatch.setattr(Session, "changed_hands", changed_hands)
    guarded = guard(batching("llama"))
    serve(batching("llama"), Traffic(seed=3, **SHAPES["tight"]))
    assert guarded.violations == []
    assert told["park"] == {True}
    assert told["alloc"] == told["share"] == told["evict"] == {False}
    assert True in told["free"]


def test_every_byte_of_the_cache_is_covered(guard):
    """All layers, both halves, and no region leaves anything out."""
    regions, uncovered = {}, []

    class Look:
        @hookimpl
        def canary_attached(self, canary):
            regions.update(canary.regions)
            uncovered.extend(canary.uncovered)

    guarded = guard(batching("gemma3"))
    guarded.register(Look())
    serve(batching("gemma3"), Traffic())
    assert uncovered == []
    names = {f"{source.half}.{source.layer}" for region in regions.values() for source in region.sources}
    assert names == {f"{half}.{layer}" for half in "kv" for layer in range(4)}
    windows = {source.layer for r in regions.values() if r.window_tokens for source in r.sources}
    assert windows == {0, 2, 3}


def test_the_engine_goes_on_in_log_mode_when_something_of_ours_breaks(guard, monkeypatch):
    """The adapter raises in the middle of a run: off, loudly, and the outputs are what they are."""
    bare = serve(batching("gemma3"), Traffic())
    original = ContinuousBatch.view

    def view(self, batch):
        if findings.told("attached") and guarded.stats()["forwards"] == 5:
            raise ZeroDivisionError("ours")
        return original(self, batch)

    findings, guarded = Findings(), guard(batching("gemma3"))
    guarded.register(findings)
    monkeypatch.setattr(ContinuousBatch, "view", view)
    assert serve(batching("gemma3"), Traffic()) == bare
    (disabled,) = findings.told("disabled")
    assert disabled.level == "error"
    assert "ZeroDivisionError('ours')" in str(disabled.fields)
    assert guarded.stats()["forwards"] == 5


def test_the_engine_goes_on_in_log_mode_when_its_cache_is_not_what_we_know(guard, monkeypatch):
    """A cache we can't describe: a disabled event when it is made; in raise mode the caller is told."""
    monkeypatch.setattr("canary_transformers.continuous.compat.kv_groups", lambda cache: cache.no_such_attribute)
    findings, guarded = Findings(), guard(batching("llama"))
    guarded.register(findings)
    serve(batching("llama"), Traffic(requests=2))
    assert "no_such_attribute" in str(findings.told("disabled")[0].fields)
    guarded.close()
    guard(batching("llama"), mode="raise")
    with pytest.raises(AttributeError, match="no_such_attribute"):
        serve(batching("llama"), Traffic(requests=2))


def test_a_cache_that_lives_on_is_taken_over(guard):
    """A persistent manager keeps its cache, prefixes included: what is there is not judged, what is written is."""
    model, load = batching("llama"), Traffic(new_tokens=6)
    arguments = load.settings(model)

    def serve_on():
        outputs = model.generate_batch(load.prompts(), persistent_manager=True, **arguments)
        return {tuple(o.prompt_ids): o.generated_tokens for o in outputs.values()}

    try:
        first = serve_on()
        guarded = guard(model)
        assert serve_on() == first
        assert guarded.violations == []
        assert guarded.stats()["unknown_slots"] > 0
        assert serve_on() == first
        assert guarded.violations == []
        guarded.close()
        assert serve_on() == first
    finally:
        model.destroy_cached_continuous_batching_manager()


def test_zero_embeddings_raise_no_alarm_in_the_engine(guard):
    """A prompt of padding tokens writes zeros over zeros in the first layer."""
    model = batching("llama")
    assert not model.get_input_embeddings().weight[0].any()
    guarded = guard(model)
    load = Traffic(requests=1)
    outputs = model.generate_batch([[0] * 20, [0, 0, 5, 0]], **load.settings(model))
    assert len(outputs) == 2
    assert guarded.violations == []
    # Where the cache isn't cleared, there were other bytes before.
    assert guarded.stats()["dismissed"] > 0 or not HAS_POOL


def test_a_reused_request_name_is_another_request(guard):
    """What the old one wrote proves nothing about the new one."""
    model, load = batching("llama"), Traffic()
    guarded = guard(model)
    with model.continuous_batching_context_manager(**load.settings(model)) as manager:
        for prompt in load.prompts():
            for tokens in (prompt, prompt[::-1], prompt):
                manager.add_request(tokens, request_id="again", max_new_tokens=5)
                while manager.get_result(timeout=1) is None:
                    pass
    assert guarded.violations == []
    assert guarded.stats()["forwards"] > 50


def test_a_forward_that_raises_is_abandoned(guard, monkeypatch):
    """An engine that tries once more, e.g. after it ran out of memory: nothing of the first try is recorded."""
    runner = importlib.import_module("transformers.generation.continuous_batching.model_runner").ModelRunner
    processor = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    compute, step = runner.compute_batch, processor.ContinuousBatchProcessor._generation_step
    failures = []

    def failing(self, *args):
        if findings.told("attached") and guarded.stats()["forwards"] == 5 and not failures:
            failures.append(MemoryError("no memory left"))
            raise failures[0]
        return compute(self, *args)

    def trying(self, *args):
        try:
            step(self, *args)
        except MemoryError:
            step(self, *args)

    bare = serve(batching("llama"), Traffic())
    monkeypatch.setattr(runner, "compute_batch", failing)
    monkeypatch.setattr(processor.ContinuousBatchProcessor, "_generation_step", trying)
    findings, guarded = Findings(), guard(batching("llama"))
    guarded.register(findings)
    assert serve(batching("llama"), Traffic()) == bare
    assert failures
    assert guarded.violations == []
    assert [e.name for e in findings.events if e.level == "error"] == []
