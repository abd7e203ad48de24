"""K and V of an encoder's states: written once for an input, read by each forward of its answer."""

import functools
from typing import Any

import pytest
import torch
from tiny.generation import CACHE, expect_clean, flip, generate, listening, prompts
from tiny.models import STATES, encoding
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from canary_core import Kind

pytestmark = pytest.mark.usefixtures("one_thread")
model = functools.cache(encoding)


def asked(kind: str) -> torch.Tensor:
    """Two inputs."""
    draw = torch.Generator().manual_seed(7)
    return torch.randn(2, 8, 2 * STATES, generator=draw) if kind == "whisper" else prompts()


def answer(kind: str, **settings: Any) -> Any:
    """What the model generates."""
    more = {"decoder_start_token_id": 1, "bos_token_id": 1, "min_new_tokens": 12, **settings}
    return generate(model(kind), asked(kind), **more)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"do_sample": True}])
@pytest.mark.parametrize("kind", ["bart", "t5", "whisper"])
def test_answers_stay_the_same_and_all_is_guarded(kind: str, settings: dict[str, Any]) -> None:
    """Beams, static tensors, two inputs after each other: silent, no byte is left out, and each state is read in each
    forward but the first."""
    expected = [answer(kind, **settings) for _ in range(2)]
    watch, findings = listening(model(kind))
    with watch:
        got = [answer(kind, **settings) for _ in range(2)]
        stats = expect_clean(watch)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    regions = [set(e.fields["regions"]) for e in findings.told("coverage")]
    assert regions.count({"cross"}) >= 2
    assert all(e.fields["coverage_ratio"] == 1.0 for e in findings.told("coverage"))
    assert [e.name for e in findings.events if e.level in ("warning", "error") and e.name != "summary"] == []
    rows = 2 * settings.get("num_beams", 1)
    assert stats["checked_slots"] >= 2 * (12 - 1) * rows * STATES


def cache_of(kind: str) -> EncoderDecoderCache:
    """An empty cache."""
    config = model("bart").config
    if kind == "static":
        return EncoderDecoderCache(
            StaticCache(config=config, max_cache_len=40), StaticCache(config=config, max_cache_len=STATES)
        )
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def decode(cache: Cache, encoded: Any, *tokens: int) -> None:
    """Direct calls, each with one token of both rows."""
    with torch.no_grad():
        for token in tokens:
            ids = torch.full((2, 1), token)
            model("bart")(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True, **{CACHE: cache})


def encode(ids: torch.Tensor) -> Any:
    """The encoder's states."""
    with torch.no_grad():
        return model("bart").get_encoder()(ids)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("layer", "half"), [(0, "keys"), (1, "values")])
def test_a_flipped_bit_is_told_with_layer_and_position(kind: str, layer: int, half: str) -> None:
    """Also in rows that have changed places since, and in the states of a later input after a reset."""
    watch, _ = listening(model("bart"))
    encoded = encode(prompts())
    with watch:
        cache = cache_of(kind)
        decode(cache, encoded, 1, 7, 8)
        flip(cache.cross_attention_cache, layer, half, row=1, index=4)
        decode(cache, encoded, 9)
        (found,) = watch.violations
        assert (found.kind, found.region, found.layer, found.half) == (Kind.BYTES, "cross", layer, half[0])
        assert (found.stored_position, found.stored_request, found.step_written) == (4, "generate 1 encoder row 1", 1)
        cache.reorder_cache(torch.tensor([1, 0]))
        decode(cache, encoded, 10)
        assert len(watch.violations) == 1
        flip(cache.cross_attention_cache, layer, half, row=1, index=5)
        decode(cache, encoded, 11)
        assert [(v.layer, v.stored_position) for v in watch.violations[1:]] == [(layer, 5)]
        if kind == "static":
            cache.reset()
            decode(cache, encode(prompts() + 1), 1, 7)
            assert len(watch.violations) == 2
            flip(cache.cross_attention_cache, layer, half, row=0, index=6)
            decode(cache, encoded, 11)
            assert [(v.layer, v.stored_position) for v in watch.violations[2:]] == [(layer, 6)]


def generated(cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """The scores of an answer of four tokens, with a cache of the caller's."""
    more = {"decoder_start_token_id": 1, "bos_token_id": 1, "min_new_tokens": 4, "max_new_tokens": 4, CACHE: cache}
    got = model("bart").generate(ids, do_sample=False, return_dict_in_generate=True, output_scores=True, **more)
    return torch.stack(got.scores)


@pytest.mark.parametrize("book", [True, False])
def test_cross_attention_that_goes_on_with_the_input_before_is_told(book: bool) -> None:
    """A cache whose cross-attention half is not reset with the rest is found at the first forward of the next input,
    at every state; one whose layers are marked as to be filled is filled anew, and silent."""
    expected = [generated(cache_of("static"), prompts() + n) for n in range(2)]
    watch, _ = listening(model("bart"))
    with watch:
        cache = cache_of("static")
        assert torch.equal(generated(cache, prompts()), expected[0])
        cache.self_attention_cache.reset()
        if not book:
            cache.is_updated = dict.fromkeys(cache.is_updated, False)
            cache.cross_attention_cache.reset()
        right = torch.equal(generated(cache, prompts() + 1), expected[1])
        found = list(watch.violations)
    assert right != book
    assert len(found) == (2 * STATES if book else 0)
    for v in found:
        assert (v.kind, v.region, v.stored_request) == (Kind.PREFIX, "cross", v.request)
        assert v.stored_identity.startswith("the encoder's states #")
    assert {v.position for v in found} == (set(range(STATES)) if book else set())


def test_the_same_input_in_another_tensor_is_no_other_input() -> None:
    """By content, not by address: an answer that goes on with the states encoded again is silent."""
    watch, _ = listening(model("bart"))
    with watch:
        cache = cache_of("static")
        generated(cache, prompts())
        cache.self_attention_cache.reset()
        generated(cache, prompts())
        stats = expect_clean(watch)
    assert stats["checked_slots"] >= 2 * 2 * 3 * STATES


def test_a_cache_with_an_update_of_its_own_is_named() -> None:
    """Its layout is not known; the self-attention half is guarded."""

    class Own(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            return super().update(*args, **kwargs)

    watch, findings = listening(model("bart"))
    with watch:
        cache = EncoderDecoderCache(DynamicCache(config=model("bart").config), Own(config=model("bart").config))
        decode(cache, encode(prompts()), 1, 7, 8)
        expect_clean(watch)
    (coverage,) = findings.told("coverage")
    assert [u["name"] for u in coverage.fields["uncovered"]] == ["cross_attention"]
    assert 0 < coverage.fields["coverage_ratio"] < 1
