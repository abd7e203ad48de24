"""`generate()` and direct calls of unmodified models under guard: no false alarm, same outputs, every fault found."""

import copy
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from canary_transformers import Guard, guard
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CompileConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticCache
from transformers.generation.utils import GenerationMixin

from canary_core import CanaryConfig, Event, Kind, ViolationError, hookimpl

TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.5,
    "pad_token_id": 0,
}  # fmt: skip
WINDOW = 8
LOOP = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])
"""A prompt that repeats itself, so that prompt lookup has something to propose."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def build(name: str) -> Any:
    """The tiny model of that name, random weights, made once."""
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**TINY, sliding_window=WINDOW)).eval()
    if name == "gemma3":
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**TINY, sliding_window=WINDOW, layer_types=layers)
        return Gemma3ForCausalLM(config).eval()
    return Qwen3ForCausalLM(Qwen3Config(**TINY)).eval()


class Listener:
    def __init__(self) -> None:
        self.events: list[Event] = []

    @hookimpl
    def canary_event(self, event: Event) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [e.fields for e in self.events if e.name == name]


def listening(model: Any, **config: Any) -> tuple[Any, Listener]:
    """A guard that reads every byte before it is used, and who hears its events."""
    watch = guard(model, **{"read_check": -1, "log_level": "error", **config})
    listener = Listener()
    watch.register(listener)
    return watch, listener


def generate(model: Any, ids: torch.Tensor, **settings: Any) -> Any:
    """What the model makes of `ids`, seeded."""
    torch.manual_seed(1)
    config = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **settings}
    inputs = {k: config.pop(k) for k in ("attention_mask", "past_key_values", "inputs_embeds") if k in config}
    return model.generate(ids, generation_config=GenerationConfig(**config), **inputs)


def prompts(rows: int = 2, tokens: int = 11) -> torch.Tensor:
    """Always the same random tokens."""
    return torch.randint(3, 250, (rows, tokens), generator=torch.Generator().manual_seed(7))


def forwards(model: Any, cache: Any, *chunks: torch.Tensor) -> list[torch.Tensor]:
    """Feeds chunk after chunk by hand; gives the logits."""
    with torch.no_grad():
        return [model(input_ids=chunk, past_key_values=cache).logits for chunk in chunks]


def new_cache(model: Any, kind: str) -> Any:
    """An empty cache."""
    return StaticCache(config=model.config, max_cache_len=40) if kind == "static" else DynamicCache(config=model.config)


def expect_clean(watch: Any) -> dict[str, int]:
    """Nothing found, nothing explained away; gives the counters."""
    assert [str(v) for v in watch.violations] == []
    stats: dict[str, int] = watch.stats()
    assert stats["violations"] == 0
    assert stats["dismissed"] == 0
    return stats


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
    model, settings = build(name), SCENARIOS[scenario]
    ids = LOOP if scenario == "lookup" else prompts()
    expected = generate(model, ids, **settings)
    watch, listener = listening(model)
    with watch:
        assert torch.equal(generate(model, ids, **settings), expected)
    stats = expect_clean(watch)
    assert stats["checked_forwards"] >= stats["forwards"] > 3
    assert stats["checked_bytes"] > 0
    assert stats["unknown_slots"] == 0
    assert [e.name for e in listener.events if e.level != "info"] == []


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_left_padding_is_guarded_like_any_token(name: str, kind: str) -> None:
    """Pads are written too. Their embedding is all zero, so that writing one leaves a zeroed slot as it was."""
    model = build(name)
    ids = prompts()
    ids[0, :5] = 0
    settings = {"attention_mask": (ids != 0).long(), "cache_implementation": kind}
    expected = generate(model, ids, **settings)
    with listening(model)[0] as watch:
        assert torch.equal(generate(model, ids, **settings), expected)
    assert expect_clean(watch)["recorded_slots"] > 2 * WINDOW


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_goes_on_over_two_generations(name: str, kind: str) -> None:
    """The second call extends the sequence of the first, whether it is given all tokens or the new ones only."""
    model = build(name)

    def both() -> torch.Tensor:
        cache = new_cache(model, kind)
        first = generate(model, prompts(1), past_key_values=cache, max_new_tokens=5)
        longer = torch.cat([first, prompts(1, 4)], dim=1)
        return generate(model, longer, past_key_values=cache, max_new_tokens=5)

    expected = both()
    with listening(model)[0] as watch:
        assert torch.equal(both(), expected)
        assert watch.stats()["forwards"] == 10
    expect_clean(watch)


def test_direct_forwards_and_a_cache_that_outgrows_its_room() -> None:
    """Chunks of any length; records survive the move to a larger region, where a flip is still found."""
    model = build("gemma3")
    chunks = [prompts(2, n) for n in (3, 90, 1, 60, 120, 2)]
    expected = forwards(model, new_cache(model, "dynamic"), *chunks)
    watch, listener = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        for got, want in zip(forwards(model, cache, *chunks), expected, strict=True):
            assert torch.equal(got, want)
        expect_clean(watch)
        assert watch.stats()["forwards"] == len(chunks)
        assert len(listener.named("attached")) == 2
        flip(cache, 2, "values", row=1, index=17)
        forwards(model, cache, prompts(2, 1))
        (found,) = watch.violations
    assert (found.kind, found.layer, found.half, found.stored_position) == (Kind.BYTES, 2, "v", 17)
    assert found.step_written == 2


def flip(cache: Any, layer: int, half: str, row: int, index: int) -> None:
    """One bit of the last head, at an index of the tensor."""
    getattr(cache.layers[layer], half)[row, -1, index].view(torch.uint8)[3] ^= 1


@pytest.mark.parametrize("half", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_one_flipped_bit_is_found_before_it_is_read(name: str, kind: str, layer: int, half: str) -> None:
    """Layer, half, row and position are named, also where a window has moved on."""
    model = build(name)
    with listening(model)[0] as watch:
        cache = new_cache(model, kind)
        forwards(model, cache, prompts(2, 12), prompts(2, 1), prompts(2, 3))
        expect_clean(watch)
        window = 0 if name == "llama" or (name == "gemma3" and layer == 2) else WINDOW - (kind == "dynamic")
        flip(cache, layer, half, row=1, index=4)
        forwards(model, cache, prompts(2, 1))
        (found,) = watch.violations
    assert (found.kind, found.layer, found.half) == (Kind.BYTES, layer, half[0])
    assert found.position == (16 - window + 4 if window else 4)
    assert found.request is not None
    assert found.request.endswith("row 1")
    assert found.region == ("window" if window else "full")


def test_a_store_that_never_ran_is_found() -> None:
    """A static layer keeps its zeros where the new token should be."""
    model = build("llama")
    with listening(model)[0] as watch:
        cache = new_cache(model, "static")
        forwards(model, cache, prompts(2, 6))
        layer = cache.layers[1]
        original = layer.update

        def update(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            kept = layer.values.clone()
            out = original(keys, values, *args, **kwargs)
            layer.values.copy_(kept)
            return out

        layer.update = update
        forwards(model, cache, prompts(2, 1))
    assert {(v.kind, v.source, v.position) for v in watch.violations} == {(Kind.LOST_WRITE, "v.1", 6)}
    assert len(watch.violations) == 2


def test_a_layer_that_is_not_reordered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams move to other rows; one layer stays behind."""
    model = build("llama")
    original = DynamicLayer.reorder_cache

    def forgetful(layer: Any, rows: torch.Tensor) -> None:
        if layer is not forgetful.victim:  # type: ignore[attr-defined]
            original(layer, rows)

    def choose(cache: Any, rows: torch.Tensor) -> None:
        forgetful.victim = cache.layers[1]  # type: ignore[attr-defined]
        reorder(cache, rows)

    reorder = Cache.reorder_cache
    monkeypatch.setattr(Cache, "reorder_cache", choose)
    monkeypatch.setattr(DynamicLayer, "reorder_cache", forgetful)
    with listening(model)[0] as watch:
        generate(model, prompts(1), num_beams=3)
    assert {(v.kind, v.layer) for v in watch.violations} == {(Kind.BYTES, 1)}


def test_a_cache_reordered_by_the_wrong_beams_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers agree, but the rows are not the sequences that go on: tokens differ from the caller's own."""
    model = build("llama")
    with listening(model)[0] as watch:
        reorder = Cache.reorder_cache
        monkeypatch.setattr(Cache, "reorder_cache", lambda cache, rows: reorder(cache, rows.roll(1)))
        generate(model, prompts(1), num_beams=3)
        monkeypatch.undo()
    assert Kind.TOKEN in {v.kind for v in watch.violations}
    assert {v.kind for v in watch.violations} <= {Kind.TOKEN, Kind.PREFIX}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_roll_back_that_is_forgotten_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts stay in the cache, and are read as tokens that the sequence does not have."""
    model = build(name)
    with listening(model)[0] as watch:
        crop = Cache.crop
        monkeypatch.setattr(Cache, "crop", lambda cache, tokens: crop(cache, 0))
        generate(model, LOOP, prompt_lookup_num_tokens=3)
        monkeypatch.undo()
    assert Kind.TOKEN in {v.kind for v in watch.violations}


def test_layers_that_do_not_roll_back_are_named() -> None:
    """Told to crop, one layer keeps its slots; attention reads them all the same."""
    model = build("llama")
    watch, listener = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9))
        cache.layers[1].crop = lambda tokens: None
        cache.crop(-3)
        forwards(model, cache, prompts(2, 1))
    assert {(v.kind, v.position) for v in watch.violations} == {(Kind.UNWRITTEN, p) for p in (6, 7, 8)}
    (told,) = listener.named("cache_layers_disagree")
    assert told["layer_tokens"] == {1: 9}
    assert told["expected_tokens"] == 6


def test_a_crop_that_no_layer_follows_is_found_and_guarding_goes_on() -> None:
    """All layers keep the slots that are said to be gone."""
    model = build("llama")
    watch, listener = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9))
        for layer in cache.layers:
            layer.crop = lambda tokens: None
        cache.crop(-2)
        forwards(model, cache, prompts(2, 1))
        assert {(v.kind, v.position) for v in watch.violations} == {(Kind.UNWRITTEN, p) for p in (7, 8)}
        flip(cache, 0, "keys", row=0, index=3)
        forwards(model, cache, prompts(2, 1))
        assert watch.violations[-1].source == "k.0"
    assert len(listener.named("cache_layers_disagree")) == 1


def test_layers_cropped_one_by_one_are_taken_as_they_are() -> None:
    """What is done behind `Cache`'s back but to all layers alike is no finding; it is told, and guarding goes on."""
    model = build("llama")
    watch, listener = listening(model)
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
    assert len(listener.named("cache_changed")) == 1
    assert [f["tokens"] for f in listener.named("adopted")] == [14]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_may_be_chosen_repeated_and_reset(name: str) -> None:
    """`Cache`'s other methods carry the records with the rows; what they leave is still guarded."""
    model = build(name)
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
    model = build("llama")
    watch, listener = listening(model)
    with watch:
        prompt = new_cache(model, "dynamic")
        forwards(model, prompt, prompts(1, 9))
        for seed in range(2):
            cache = copy.deepcopy(prompt)
            ids = torch.cat([prompts(1, 9), prompts(1, 3) + seed], dim=1)
            generate(model, ids, past_key_values=cache, max_new_tokens=4)
            expect_clean(watch)
        flip(cache, 1, "values", row=0, index=2)
        forwards(model, cache, prompts(1, 1))
        assert [(v.source, v.position) for v in watch.violations] == [("v.1", 2)]
    assert [f["tokens"] for f in listener.named("adopted")] == [9, 9]


def test_embeddings_have_unknown_tokens() -> None:
    """No ids, no guess: bytes are guarded, tokens of those positions are not judged."""
    model = build("llama")
    embeds = model.get_input_embeddings()(prompts()).detach()
    empty = torch.zeros(2, 0, dtype=torch.long)
    expected = generate(model, empty, inputs_embeds=embeds)
    with listening(model)[0] as watch:
        assert torch.equal(generate(model, empty, inputs_embeds=embeds), expected)
        cache = new_cache(model, "dynamic")
        with torch.no_grad():
            model(inputs_embeds=embeds, past_key_values=cache)
            model(inputs_embeds=embeds[:, :2], past_key_values=cache)
        expect_clean(watch)
        flip(cache, 0, "keys", row=1, index=12)
        forwards(model, cache, prompts(2, 1))
        (found,) = watch.violations
    assert found.source == "k.0"
    assert found.stored_token in (None, -1)


def test_without_a_cache_there_is_nothing_to_do() -> None:
    """`use_cache=False`: no Canary is made."""
    model = build("llama")
    watch, listener = listening(model)
    with watch:
        generate(model, prompts(), use_cache=False, max_new_tokens=3)
        model(prompts(), use_cache=False)
    assert watch.stats()["forwards"] == 0
    assert listener.events == []


def test_fp8_layers_are_guarded_and_others_are_named() -> None:
    """The frozen scale of fp8 keeps written bytes as they are."""
    if not hasattr(__import__("transformers.cache_utils").cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this Transformers has no fp8 cache")
    model = build("llama")
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    expected = generate(model, prompts(), **settings)
    with listening(model, non_finite=False)[0] as watch:
        assert torch.equal(generate(model, prompts(), **settings), expected)
        stats = expect_clean(watch)
    assert stats["checked_bytes"] > 0


def test_cross_attention_is_named_and_the_rest_guarded() -> None:
    """An encoder-decoder cache: its self-attention half has slots, the other is told."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=256, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=128,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    settings = {"num_beams": 2, "decoder_start_token_id": 2}
    expected = generate(model, prompts(), **settings)
    watch, listener = listening(model)
    with watch:
        assert torch.equal(generate(model, prompts(), **settings), expected)
        stats = expect_clean(watch)
    assert stats["checked_bytes"] > 0
    assert [u["name"] for u in listener.named("coverage")[0]["uncovered"]] == ["cross_attention"]


def test_hybrid_layers_are_named_and_the_rest_guarded() -> None:
    """Convolution states are told, attention layers between them guarded."""
    torch.manual_seed(0)
    config = Lfm2Config(**{**TINY, "num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"])
    model = Lfm2ForCausalLM(config).eval()
    expected = generate(model, prompts())
    watch, listener = listening(model)
    with watch:
        assert torch.equal(generate(model, prompts()), expected)
        stats = expect_clean(watch)
    assert stats["checked_bytes"] > 0
    (coverage,) = listener.named("coverage")
    assert [u["name"] for u in coverage["uncovered"]] == ["LinearAttentionLayer.0", "LinearAttentionLayer.2"]
    assert 0 < coverage["coverage_ratio"] < 1


def test_raise_mode_stops_the_generation_that_reads_a_wrong_byte() -> None:
    """`generate()` raises the finding."""
    model = build("llama")
    with guard(model, mode="raise", read_check=-1, log_level="error"):
        cache = new_cache(model, "dynamic")
        first = generate(model, prompts(1), past_key_values=cache, max_new_tokens=3)
        flip(cache, 1, "keys", row=0, index=2)
        with pytest.raises(ViolationError) as raised:
            generate(model, torch.cat([first, prompts(1, 4)], dim=1), past_key_values=cache)
        assert raised.value.violation.source == "k.1"  # type: ignore[attr-defined]


def test_an_error_of_ours_is_told_and_the_model_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log mode: one ``disabled`` event, and the same output."""
    model = build("llama")
    expected = generate(model, prompts())
    watch, listener = listening(model)
    with watch:
        monkeypatch.setattr("canary_transformers.caches.look", lambda *a, **k: 1 // 0)
        assert torch.equal(generate(model, prompts()), expected)
    (told,) = listener.named("disabled")
    assert "ZeroDivisionError" in told["error"]


def test_a_guard_leaves_nothing_behind() -> None:
    """The engine's functions are its own again, and caches that are gone are not kept."""
    model = build("llama")
    before = (Cache.crop, Cache.reset, GenerationMixin.generate, PreTrainedModel.__call__)
    with listening(model)[0] as watch:
        assert Cache.crop is not before[0]
        generate(model, prompts())
        gc.collect()
        assert watch._caches == []
        assert watch.stats()["forwards"] == 12
        other = build("qwen3")
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
    model = copy.deepcopy(build("llama"))
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
        generate(build("llama"), prompts(), max_new_tokens=3)
        cache = new_cache(build("mistral"), "dynamic")
        with torch.no_grad():
            build("mistral").model(input_ids=prompts(), past_key_values=cache)
        assert expect_clean(watch)["forwards"] == 4
        flip(cache, 1, "values", row=0, index=3)
        forwards(build("mistral"), cache, prompts(2, 1))
        assert [v.source for v in watch.violations] == ["v.1"]


def test_inference_mode_and_gradients_do_not_matter() -> None:
    """A cache may be used in and out of inference mode; a training step keeps its gradients."""
    model = build("llama")
    with listening(model)[0] as watch:
        with torch.inference_mode():
            cache = new_cache(model, "dynamic")
            model(prompts(), past_key_values=cache)
            model(prompts(2, 1), past_key_values=cache)
        forwards(model, cache, prompts(2, 2))
        model(prompts(), use_cache=True).logits.sum().backward()
        assert model.lm_head.weight.grad is not None
        model.zero_grad()
        expect_clean(watch)


def test_a_window_that_records_its_past_is_followed() -> None:
    """`activate_past_recording`: the window is cut by the next crop only."""
    model = build("mistral")
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
