"""`generate()` and direct calls of unmodified models under guard: no false alarm, same outputs, nothing left behind."""

import copy
import gc
from typing import Any

import pytest
import torch
from canary_transformers import Guard
from tiny.generation import (
    CACHE,
    LOOP,
    expect_clean,
    flip,
    forwards,
    generate,
    listening,
    new_cache,
    prompts,
)
from tiny.models import WINDOW, generating
from transformers import (
    CompileConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin

from canary_core import CanaryConfig

pytestmark = pytest.mark.usefixtures("one_thread")


SCENARIOS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "static beams": {"num_beams": 2, "cache_implementation": "static"},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunks": {"prefill_chunk_size": 4, "cache_implementation": "static"},
}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen3"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_clean_generation_raises_no_alarm_and_is_not_changed(name: str, scenario: str) -> None:
    """Every kind of cache and decoding: bit-identical sequences, every forward checked, nothing found."""
    model, settings = generating(name), SCENARIOS[scenario]
    ids = LOOP if scenario == "lookup" else prompts()
    expected = generate(model, ids, **settings)
    watch, findings = listening(model)
    with watch:
        assert torch.equal(generate(model, ids, **settings), expected)
    stats = expect_clean(watch)
    assert stats["checked_forwards"] >= stats["forwards"] > 3
    assert stats["checked_bytes"] > 0
    assert stats["unknown_slots"] == 0
    assert [e.name for e in findings.events if e.level != "info"] == []


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_left_padding_is_guarded_like_any_token(name: str, kind: str) -> None:
    """Pads are written too. Their embedding is all zero, so that writing one leaves a zeroed slot as it was."""
    model = generating(name)
    ids = prompts()
    ids[0, :5] = 0
    settings = {"attention_mask": (ids != 0).long(), "cache_implementation": kind}
    expected = generate(model, ids, **settings)
    with listening(model)[0] as watch:
        assert torch.equal(generate(model, ids, **settings), expected)
    assert expect_clean(watch)["recorded_slots"] > 2 * WINDOW


def test_embeddings_have_unknown_tokens() -> None:
    """No ids, no guess: bytes are guarded, tokens of those positions are not judged."""
    model = generating("llama")
    embeds = model.get_input_embeddings()(prompts()).detach()
    empty = torch.zeros(2, 0, dtype=torch.long)
    expected = generate(model, empty, inputs_embeds=embeds)
    with listening(model)[0] as watch:
        assert torch.equal(generate(model, empty, inputs_embeds=embeds), expected)
        cache = new_cache(model, "dynamic")
        with torch.no_grad():
            model(inputs_embeds=embeds, **{CACHE: cache})
            model(inputs_embeds=embeds[:, :2], **{CACHE: cache})
        expect_clean(watch)
        flip(cache, 0, "keys", row=1, index=12)
        forwards(model, cache, prompts(2, 1))
        (found,) = watch.violations
    assert found.source == "k.0"
    assert found.stored_token in (None, -1)


def test_embeddings_of_zeros_are_no_lost_write() -> None:
    """As of padding in `inputs_embeds`: their K and V are zero, as is a fresh static cache. A write that is lost where
    something was written before is told all the same."""
    model = generating("llama")
    embeds = model.get_input_embeddings()(prompts(2, 9)).detach()
    embeds[0, :3] = 0
    with listening(model)[0] as watch, torch.no_grad():
        cache = new_cache(model, "static")
        model(inputs_embeds=embeds, **{CACHE: cache})
        assert watch.violations == []
        assert watch.stats()["dismissed"] > 0


@pytest.mark.parametrize("kind", ["static", None])
def test_an_image_that_comes_to_nothing_is_no_lost_write(kind: str | None) -> None:
    """The projector of an untrained Gemma 3 makes zeros of every image: so do K and V of the image's token."""
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**size, "vocab_size": 120, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8}
    text |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(
        text_config=text, vision_config={**size, "image_size": 28, "patch_size": 14, "num_channels": 3},
        mm_tokens_per_image=1, image_token_index=4, boi_token_index=5, eoi_token_index=6,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval()
    ids = prompts(2, 12) % 90 + 10
    ids[:, 0] = 4
    inputs = {"pixel_values": torch.rand(2, 3, 28, 28), "token_type_ids": (ids == 4).long()}
    settings = GenerationConfig(
        max_new_tokens=5, do_sample=False, cache_implementation=kind, eos_token_id=None, disable_compile=True
    )
    with listening(model)[0] as watch:
        model.generate(input_ids=ids, generation_config=settings, **inputs)
        assert [str(v) for v in watch.violations] == []
        assert watch.stats()["dismissed"] > 0 or kind is None


def test_without_a_cache_there_is_nothing_to_do() -> None:
    """`use_cache=False`: no Canary is made."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        generate(model, prompts(), use_cache=False, max_new_tokens=3)
        model(prompts(), use_cache=False)
    assert watch.stats()["forwards"] == 0
    assert findings.events == []


def test_an_error_of_ours_is_told_and_the_model_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log mode: one ``disabled`` event, and the same output."""
    model = generating("llama")
    expected = generate(model, prompts())
    watch, findings = listening(model)
    with watch:
        monkeypatch.setattr("canary_transformers.generate.caches.look", lambda *a, **k: 1 // 0)
        assert torch.equal(generate(model, prompts()), expected)
    (told,) = findings.told("disabled")
    assert "ZeroDivisionError" in told.fields["error"]


def test_a_guard_leaves_nothing_behind() -> None:
    """The engine's functions are its own again, and caches that are gone are not kept."""
    model = generating("llama")
    before = (Cache.crop, Cache.reset, GenerationMixin.generate, PreTrainedModel.__call__)
    with listening(model)[0] as watch:
        assert Cache.crop is not before[0]
        generate(model, prompts())
        gc.collect()
        assert watch._caches == []
        assert watch.stats()["forwards"] == 12
        other = generating("qwen3")
        generate(other, prompts(), max_new_tokens=2)
        assert watch.stats()["forwards"] == 12
        copied = copy.deepcopy(model)
        assert torch.equal(generate(copied, prompts()), generate(model, prompts()))
    assert (Cache.crop, Cache.reset, GenerationMixin.generate, PreTrainedModel.__call__) == before
    assert "__call__" not in vars(PreTrainedModel)


def test_a_compiled_decode_is_bracketed_and_traces_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `generate()` compiles on a GPU: as many graphs as without a guard, none broken, every forward checked."""
    monkeypatch.setattr(GenerationMixin, "_valid_auto_compile_criteria", lambda *args: True)
    settings = {"cache_implementation": "static", "compile_config": CompileConfig(backend="eager", mode=None)}
    model = copy.deepcopy(generating("llama"))
    graphs = []
    outputs = []
    for on in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model.__dict__.pop("_compiled_call", None)
        with listening(model, mode="log" if on else "off")[0] as watch:
            outputs.append(generate(model, prompts(), **settings))
        graphs.append(dict(torch._dynamo.utils.counters["stats"]))
        assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.equal(*outputs)
    assert graphs[0] == graphs[1]
    assert expect_clean(watch)["forwards"] == 12


def test_every_model_of_the_process_is_guarded_for_the_plugin() -> None:
    """What `CANARY_PLUGINS=transformers` turns on: outermost calls, whichever model they are of."""
    config = CanaryConfig.load(read_check=-1, log_level="error")
    with Guard(None, config) as watch:
        generate(generating("llama"), prompts(), max_new_tokens=3)
        cache = new_cache(generating("mistral"), "dynamic")
        with torch.no_grad():
            generating("mistral").model(input_ids=prompts(), **{CACHE: cache})
        assert expect_clean(watch)["forwards"] == 4
        flip(cache, 1, "values", row=0, index=3)
        forwards(generating("mistral"), cache, prompts(2, 1))
        assert [v.source for v in watch.violations] == ["v.1"]


def test_inference_mode_and_gradients_do_not_matter() -> None:
    """A cache may be used in and out of inference mode; a training step keeps its gradients."""
    model = generating("llama")
    with listening(model)[0] as watch:
        with torch.inference_mode():
            cache = new_cache(model, "dynamic")
            model(prompts(), **{CACHE: cache})
            model(prompts(2, 1), **{CACHE: cache})
        forwards(model, cache, prompts(2, 2))
        model(prompts(), use_cache=True).logits.sum().backward()
        assert model.lm_head.weight.grad is not None
        model.zero_grad()
        expect_clean(watch)
