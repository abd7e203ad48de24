"""A cache of `generate()` that is not what it should be is found before it is read: flipped bits, lost stores, rows and
roll-backs that a layer, or all, did not follow."""

from typing import Any

import pytest
import torch
from canary_transformers import guard
from tiny.generation import (
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
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation.utils import GenerationMixin

from canary_core import Kind, ViolationError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("half", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_one_flipped_bit_is_found_before_it_is_read(name: str, kind: str, layer: int, half: str) -> None:
    """Layer, half, row and position are named, also where a window has moved on."""
    model = generating(name)
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
    model = generating("llama")
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


@pytest.mark.parametrize(
    "settings", [{}, {"do_sample": True}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str
)
def test_a_token_that_another_row_sampled_is_found(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """What `generate()` samples goes to the end of its sequences. A decode that computes another row's last token is
    told in that forward, with both tokens."""
    original = GenerationMixin.prepare_inputs_for_generation
    fed: list[tuple[int, int]] = []

    def prepare(model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = original(model, input_ids, *args, **kwargs)
        wrong = inputs["input_ids"].flip(0)
        if not fed and wrong.shape[1] == 1 and input_ids.shape[1] > 14 and wrong[0] != input_ids[0, -1]:
            fed.append((int(wrong[0]), int(input_ids[0, -1])))
            inputs["input_ids"] = wrong
        return inputs

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepare)
    model = generating("llama")
    with listening(model, incident_tokens=True)[0] as watch:
        generate(model, prompts(2, 11), max_new_tokens=8, **settings)
    ((computed, own),) = fed
    first = watch.violations[0]
    assert (first.kind, first.token, first.stored_token) == (Kind.WRITE_INPUT, own, computed)
    assert first.request is not None
    assert "row 0" in first.request


def test_a_layer_that_is_not_reordered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams move to other rows; one layer stays behind."""
    model = generating("llama")
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


def test_beams_that_are_reordered_without_v_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """K of each layer moves to other rows, V stays behind: found in V of every layer, and nowhere else."""
    model = generating("llama")

    def keys_only(layer: Any, rows: torch.Tensor) -> None:
        layer.keys = layer.keys.index_select(0, rows)

    with listening(model)[0] as watch:
        generate(model, prompts(1), num_beams=3)
        expect_clean(watch)
        monkeypatch.setattr(DynamicLayer, "reorder_cache", keys_only)
        generate(model, prompts(1), num_beams=3)
    assert {(v.kind, v.layer, v.half) for v in watch.violations} == {(Kind.BYTES, layer, "v") for layer in range(3)}


def test_a_cache_reordered_by_the_wrong_beams_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers agree, but the rows are not the sequences that go on: tokens differ from the caller's own."""
    model = generating("llama")
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
    model = generating(name)
    with listening(model)[0] as watch:
        crop = Cache.crop
        monkeypatch.setattr(Cache, "crop", lambda cache, tokens: crop(cache, 0))
        generate(model, LOOP, prompt_lookup_num_tokens=3)
        monkeypatch.undo()
    assert Kind.TOKEN in {v.kind for v in watch.violations}


def test_layers_that_do_not_roll_back_are_named() -> None:
    """Told to crop, one layer keeps its slots; attention reads them all the same."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9))
        cache.layers[1].crop = lambda tokens: None
        cache.crop(-3)
        forwards(model, cache, prompts(2, 1))
    assert {(v.kind, v.position) for v in watch.violations} == {(Kind.UNWRITTEN, p) for p in (6, 7, 8)}
    assert all(v.step_written == 1 for v in watch.violations)
    told = [v.explanation for v in watch.violations]
    assert all("cleared or rolled back; " in text and " wrote it at step 1: " in text for text in told)
    (told,) = findings.told("cache_layers_disagree")
    assert told.fields["layer_tokens"] == {1: 9}
    assert told.fields["expected_tokens"] == 6


def test_a_crop_that_no_layer_follows_is_found_and_guarding_goes_on() -> None:
    """All layers keep the slots that are said to be gone."""
    model = generating("llama")
    watch, findings = listening(model)
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
    assert len(findings.told("cache_layers_disagree")) == 1


def test_a_reset_that_keeps_the_length_is_called_a_wrong_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Transformers 5.17: the numbers are zeroed, and the next forward reads them. No prefix cache is blamed."""
    model = generating("llama")

    def zero(layer: Any) -> None:
        layer.keys.zero_()
        layer.values.zero_()

    monkeypatch.setattr(DynamicLayer, "reset", zero)
    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9))
        cache.reset()
        forwards(model, cache, prompts(2, 4))
    assert {v.kind for v in watch.violations} == {Kind.UNWRITTEN}
    assert {(d.fields["diagnosis"], d.fields["sure"]) for d in findings.told("diagnosis")} == {
        ("wrong_length", "likely")
    }


def test_raise_mode_stops_the_generation_that_reads_a_wrong_byte() -> None:
    """`generate()` raises the finding."""
    model = generating("llama")
    with guard(model, mode="raise", read_check=-1, log_level="error"):
        cache = new_cache(model, "dynamic")
        first = generate(model, prompts(1), cache=cache, max_new_tokens=3)
        flip(cache, 1, "keys", row=0, index=2)
        with pytest.raises(ViolationError) as raised:
            generate(model, torch.cat([first, prompts(1, 4)], dim=1), cache=cache)
        assert raised.value.violation.source == "k.1"  # type: ignore[attr-defined]
