"""What a layer stores is still there when the forward has ended."""

from typing import Any

import pytest
from vllm_on_cpu import guarded
from vllm_on_cpu.engine import SmallEngine
from vllm_on_cpu.params import shared_engine

from canary_core import Kind
from canary_core.records import Phase

pytestmark = pytest.mark.timeout(600)


def impls(engine: SmallEngine) -> dict[str, Any]:
    """vLLM's attention of each layer, by the layer's name."""
    layers = engine.runner.compilation_config.static_forward_context
    return {name: layer.impl for name, layer in layers.items() if hasattr(layer, "impl")}


def test_stores_of_all_layers_are_looked_at_and_found_right(engine):
    """Prefix hits, chunked prefill, eviction, preemption, rejected drafts: silent, and answers as without Canary. One
    note for each attention layer and forward; states are not among them."""
    engine.small.renew()
    plain = guarded.traffic(engine.small, 2, new_tokens=12)
    with guarded.guard(engine.small, store_check=True, read_check=0) as guard:
        answers = guarded.traffic(engine.small, 2, new_tokens=12)
        assert guard.trouble() == []
        stats = guard.canary.stats()
    assert answers == plain
    assert stats["noted_stores"] == stats["forwards"] * len(impls(engine.small)) > 20


def flipped(guard: guarded.Guarded, layer: int, half: str) -> tuple[list[Any], list[Any]]:
    """What is found in the decode in which this happens, and what should be; then all is served to its end."""
    engine, prompt = guard.engine, guarded.prompts("store", 1)[0]
    engine.submit("flip", prompt, 8)
    engine.submit("other", prompt[::-1], 8)
    while min(len(engine.answers[name]) for name in ("flip", "other")) < 3:
        engine.step()
    # The token that was sampled last is the one that the next forward computes.
    position = len(prompt) + len(engine.answers["flip"]) - 1
    with guarded.flip_behind_a_store(engine, layer, half, "flip") as done:
        engine.step()
    guard.canary.drain()
    found = [(v.kind, v.phase, v.layer, v.half, v.request, v.position, v.step) for v in guard.findings.violations]
    assert done == [position]
    expected = [(Kind.BYTES, Phase.POST_FORWARD, layer, half, "flip", position, guard.canary.forwards)]
    while engine.step():
        pass
    engine.scheduler.reset_prefix_cache()
    guard.canary.drain()
    return found, expected


@pytest.mark.parametrize(
    "engine", [shared_engine(n) for n in ("llama", "fp8", "window", "hybrid", "mla")], indirect=True
)
def test_a_flip_between_a_store_and_the_end_of_the_forward_is_told(engine):
    """In each layer and half, in that very forward, and never again."""
    setup = engine.setup
    for layer in range(setup.layers):
        for half in setup.halves:
            with guarded.guard(engine.small, store_check=True) as guard:
                found, expected = flipped(guard, layer, half)
                assert found == expected
                (told,) = guard.findings.violations
                assert f"the store of layer {layer} and the end of the forward" in told.explanation


@pytest.mark.parametrize("engine", [shared_engine(n) for n in ("llama", "hybrid")], indirect=True)
def test_a_store_that_never_comes_is_told_also_in_a_block_that_another_group_had(engine):
    """One layer does not store a prompt, after groups of layers have taken turns on all blocks. A token that its slot
    has had before is not judged: to store it again may change nothing."""
    small = engine.small
    small.renew()
    with guarded.guard(small, store_check=True, read_check=0) as guard:
        guarded.traffic(small, 3, new_tokens=12)
        assert guard.trouble() == []
        for layer in range(engine.setup.layers):
            prompt = guarded.prompts(f"lost {layer}", 1)[0][:40]
            small.submit(f"lost-{layer}", prompt, 4)
            unsure = guard.canary.stats()["unsure"]
            (impl,) = [impl for name, impl in impls(small).items() if f".{layer}." in name]
            impl.do_kv_cache_update = lambda *_, **__: None
            small.step()
            del impl.do_kv_cache_update
            guard.canary.drain()
            found = {(v.kind, v.layer, v.half, v.position, v.request) for v in guard.findings.violations}
            told = {(Kind.LOST_WRITE, layer, half, p, f"lost-{layer}") for half in "kv" for p in range(len(prompt))}
            assert found <= told
            assert len(told - found) <= guard.canary.stats()["unsure"] - unsure < 6
            guard.findings.violations.clear()
            while small.step():
                pass
            small.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("engine", [shared_engine("llama")], indirect=True)
def test_without_the_setting_the_same_flip_is_not_told(engine):
    """Bytes count from the end of the forward on. And vLLM's own stores are not wrapped, while with the setting they
    are, until the session ends."""
    kinds = {type(impl) for impl in impls(engine.small).values()}

    def wrapped() -> list[Any]:
        return [kind for kind in kinds if hasattr(kind.do_kv_cache_update, "__wrapped__")]

    with guarded.guard(engine.small) as guard:
        assert wrapped() == []
        found, _ = flipped(guard, 0, "v")
        assert "noted_stores" not in guard.canary.stats()
    assert (found, guard.findings.violations) == ([], [])
    with guarded.guard(engine.small, store_check=True):
        assert wrapped() == [*kinds]
    assert wrapped() == []
