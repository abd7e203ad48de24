"""Every kind of cache under guard, and what is done with one between forwards."""

import copy
from typing import Any

import pytest
import torch
from tiny.generation import (
    expect_clean,
    flip,
    forwards,
    generate,
    listening,
    new_cache,
    prompts,
)
from tiny.models import TINY, generating
from transformers import Lfm2Config, Lfm2ForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer

from canary_core import Kind

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_goes_on_over_two_generations(name: str, kind: str) -> None:
    """The second call extends the sequence of the first, whether it is given all tokens or the new ones only."""
    model = generating(name)

    def both() -> torch.Tensor:
        cache = new_cache(model, kind)
        first = generate(model, prompts(1), cache=cache, max_new_tokens=5)
        longer = torch.cat([first, prompts(1, 4)], dim=1)
        return generate(model, longer, cache=cache, max_new_tokens=5)

    expected = both()
    with listening(model)[0] as watch:
        assert torch.equal(both(), expected)
        assert watch.stats()["forwards"] == 10
    expect_clean(watch)


def test_direct_forwards_and_a_cache_that_outgrows_its_room() -> None:
    """Chunks of any length; records survive the move to a larger region, where a flip is still found."""
    model = generating("gemma3")
    chunks = [prompts(2, n) for n in (3, 90, 1, 60, 120, 2)]
    expected = forwards(model, new_cache(model, "dynamic"), *chunks)
    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        for got, want in zip(forwards(model, cache, *chunks), expected, strict=True):
            assert torch.equal(got, want)
        expect_clean(watch)
        assert watch.stats()["forwards"] == len(chunks)
        assert len(findings.told("attached")) == 2
        flip(cache, 2, "values", row=1, index=17)
        forwards(model, cache, prompts(2, 1))
        (found,) = watch.violations
    assert (found.kind, found.layer, found.half, found.stored_position) == (Kind.BYTES, 2, "v", 17)
    assert found.step_written == 2


def test_layers_cropped_one_by_one_are_taken_as_they_are() -> None:
    """What is done behind `Cache`'s back but to all layers alike is no finding; it is told, and guarding goes on."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9))
        for layer in cache.layers:
            layer.crop(-2)
        forwards(model, cache, prompts(2, 2))
        expect_clean(watch)
        flip(cache, 0, "keys", row=0, index=3)
        forwards(model, cache, prompts(2, 1))
        assert [v.source for v in watch.violations] == ["k.0"]
    assert len(findings.told("cache_changed")) == 1
    assert [e.fields["tokens"] for e in findings.told("adopted")] == [14]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_may_be_chosen_repeated_and_reset(name: str) -> None:
    """`Cache`'s other methods carry the records with the rows; what they leave is still guarded."""
    model = generating(name)
    with listening(model)[0] as watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9), prompts(2, 3))
        cache.batch_repeat_interleave(3)
        forwards(model, cache, prompts(6, 2))
        cache.batch_select_indices(torch.tensor([5, 0]))
        forwards(model, cache, prompts(2, 2))
        cache.reorder_cache(torch.tensor([1, 0]))
        forwards(model, cache, prompts(2, 1))
        expect_clean(watch)
        flip(cache, 2, "keys", row=0, index=2)
        forwards(model, cache, prompts(2, 1))
        assert [(v.source, v.position) for v in watch.violations] == [("k.2", 2)]
        cache = new_cache(model, "static")
        forwards(model, cache, prompts(2, 9))
        cache.reset()
        forwards(model, cache, prompts(2, 4), prompts(2, 1))
        assert len(watch.violations) == 1


def test_a_copied_or_filled_cache_is_adopted_and_guarded_from_then_on() -> None:
    """Prompt caching by `copy.deepcopy`: the copy came without records."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        prompt = new_cache(model, "dynamic")
        forwards(model, prompt, prompts(1, 9))
        for seed in range(2):
            cache = copy.deepcopy(prompt)
            ids = torch.cat([prompts(1, 9), prompts(1, 3) + seed], dim=1)
            generate(model, ids, cache=cache, max_new_tokens=4)
            expect_clean(watch)
        flip(cache, 1, "values", row=0, index=2)
        forwards(model, cache, prompts(1, 1))
        assert [(v.source, v.position) for v in watch.violations] == [("v.1", 2)]
    assert [e.fields["tokens"] for e in findings.told("adopted")] == [9, 9]


def test_fp8_layers_are_guarded_and_others_are_named() -> None:
    """The frozen scale of fp8 keeps written bytes as they are."""
    if not hasattr(__import__("transformers.cache_utils").cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this Transformers has no fp8 cache")
    model = generating("llama")
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    expected = generate(model, prompts(), **settings)
    with listening(model, non_finite=False)[0] as watch:
        assert torch.equal(generate(model, prompts(), **settings), expected)
        stats = expect_clean(watch)
    assert stats["checked_bytes"] > 0


def test_hybrid_layers_are_named_and_the_rest_guarded() -> None:
    """Convolution states are told, attention layers between them guarded."""
    torch.manual_seed(0)
    config = Lfm2Config(**{**TINY, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"])
    model = Lfm2ForCausalLM(config).eval()
    expected = generate(model, prompts())
    watch, findings = listening(model)
    with watch:
        assert torch.equal(generate(model, prompts()), expected)
        stats = expect_clean(watch)
    assert stats["checked_bytes"] > 0
    (coverage,) = findings.told("coverage")
    assert [u["name"] for u in coverage.fields["uncovered"]] == ["LinearAttentionLayer.0", "LinearAttentionLayer.2"]
    assert 0 < coverage.fields["coverage_ratio"] < 1


def test_a_window_that_records_its_past_is_followed() -> None:
    """`activate_past_recording`: the window is cut by the next crop only."""
    model = generating("mistral")
    with listening(model)[0] as watch:
        cache = new_cache(model, "dynamic")
        cache.activate_past_recording()
        forwards(model, cache, prompts(1, 20))
        assert isinstance(cache.layers[0], DynamicSlidingWindowLayer)
        assert cache.layers[0].keys.shape[2] == 20
        cache.crop(-3)
        for _ in range(3):
            forwards(model, cache, prompts(1, 2))
            cache.crop(0)
        forwards(model, cache, prompts(1, 2))
        stats = expect_clean(watch)
    assert stats["checked_bytes"] > 0


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_call_that_raises_is_abandoned(kind: str) -> None:
    """Nothing of it is recorded, and the next call of the model is checked like any other."""
    model = generating("llama")

    def fail(*args: Any) -> None:
        raise MemoryError("no memory left")

    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, kind)
        forwards(model, cache, prompts(2, 9))
        handle = model.model.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            forwards(model, cache, prompts(2, 3))
        handle.remove()
        forwards(model, cache, prompts(2, 3))
        expect_clean(watch)
        flip(cache, 1, "keys", row=0, index=10)
        forwards(model, cache, prompts(2, 1))
        assert [(v.source, v.position) for v in watch.violations] == [("k.1", 10)]
    assert [e.name for e in findings.events if e.level == "error" and e.name != "diagnosis"] == ["incident"]


def test_a_call_that_leaves_the_cache_alone_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is given a cache and does not use it has written nothing."""
    model = generating("llama")
    forward = model.forward
    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9))
        monkeypatch.setattr(model, "forward", lambda input_ids, **_: forward(input_ids, use_cache=False))
        forwards(model, cache, prompts(2, 3))
        monkeypatch.undo()
        forwards(model, cache, prompts(2, 3))
        expect_clean(watch)
    assert [e.name for e in findings.events if e.level == "error"] == []
