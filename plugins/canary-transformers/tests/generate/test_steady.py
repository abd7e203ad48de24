"""Forwards that change nothing but a cache's tensors, which are followed in short."""

from typing import Any

import pytest
import torch
from canary_transformers.generate import caches
from canary_transformers.generate.lengths import AHEAD, RowLengths
from tiny.generation import expect_clean, flip, forwards, generate, listening, new_cache, prompts
from tiny.models import generating
from transformers.cache_utils import DynamicLayer

from canary_core import Kind

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often all layers were looked at."""
    counted: list[int] = []
    original = caches.look

    def look(*args: Any, **named: Any) -> Any:
        counted.append(1)
        return original(*args, **named)

    monkeypatch.setattr(caches, "look", look)
    return counted


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decodes_need_no_look_at_all_layers(kind: str, looks: list[int]) -> None:
    """What costs host time for each layer happens at the prompt alone."""
    model = generating("llama")
    with listening(model)[0] as watch:
        generate(model, prompts(), cache_implementation=kind, disable_compile=True, max_new_tokens=12)
        assert watch.stats()["forwards"] == 12
    expect_clean(watch)
    # For the prompt, with what is left out and what is too much.
    assert len(looks) < 6


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_bytes_that_change_between_such_forwards_are_found(kind: str) -> None:
    """The next forward finds them where they are now."""
    model = generating("llama")
    watch, _ = listening(model)
    with watch:
        cache = new_cache(model, kind)
        forwards(model, cache, prompts(2, 5), *(prompts(2, 1) for _ in range(4)))
        expect_clean(watch)
        flip(cache, 1, "values", row=1, index=6)
        forwards(model, cache, prompts(2, 1))
    assert {(v.kind, v.layer, v.half, v.position) for v in watch.violations} == {(Kind.BYTES, 1, "v", 6)}


@pytest.mark.parametrize("layers", [[0], [1], [0, 1, 2]])
def test_tensors_that_are_cut_in_place_are_noticed(layers: list[int]) -> None:
    """They are the same objects at the same addresses. It is told before the next forward, and no byte is blamed."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 5), *(prompts(2, 1) for _ in range(4)))
        for mine in (cache.layers[i] for i in layers):
            mine.keys.data, mine.values.data = mine.keys.data[:, :, :-1], mine.values.data[:, :, :-1]
        forwards(model, cache, prompts(2, 1), prompts(2, 1))
    assert {v.kind for v in watch.violations} <= {Kind.UNWRITTEN}
    names = {"cache_changed", "cache_layers_disagree"}
    assert [e.name for e in findings.events if e.name in names] == [sorted(names)[len(layers) < 3]]


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_lengths_are_aligned(rows: int) -> None:
    """All alike, so that kernels are compiled once: each begins at a multiple of 16 bytes."""
    lengths = RowLengths(rows, torch.device("cpu"))
    for length in range(5, 5 + 2 * AHEAD):
        of = lengths.of(length)
        assert of.tolist() == [length] * rows
        assert of.is_contiguous()
        assert of.data_ptr() % 16 == 0


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("change", ["cut", "longer", "swapped"])
def test_layers_that_something_else_changes_are_noticed(layer: int, change: str) -> None:
    """After forwards that were followed in short."""
    model = generating("llama")
    watch, _ = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 5), *(prompts(2, 1) for _ in range(3)))
        mine = cache.layers[layer]
        if change == "cut":
            mine.keys, mine.values = mine.keys[:, :, :-1], mine.values[:, :, :-1]
        elif change == "longer":
            mine.keys, mine.values = (torch.cat([t, t[:, :, -1:]], dim=2) for t in (mine.keys, mine.values))
        else:
            mine.keys.data = mine.keys.flip(2).contiguous()
        try:
            forwards(model, cache, prompts(2, 1))
        except (RuntimeError, IndexError):
            assert change != "swapped"
    kinds = {v.kind for v in watch.violations}
    assert kinds == ({Kind.BYTES} if change == "swapped" else {Kind.UNWRITTEN})


def test_tokens_may_be_a_part_of_a_longer_tensor() -> None:
    """One column of all rows is no list without gaps."""
    model = generating("llama")
    with listening(model)[0] as watch:
        ids = prompts(2, 9)
        forwards(model, new_cache(model, "dynamic"), ids[:, :6], ids[:, 6:7], ids[:, 7:8], ids[:, 8:])
        assert watch.stats()["forwards"] == 4
    expect_clean(watch)


def test_a_layer_that_comes_late_is_guarded() -> None:
    """The cache has more layers than before: it is looked at anew."""
    model = generating("llama")
    with listening(model)[0] as watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 5), prompts(2, 1))
        cache.layers.append(DynamicLayer())
        forwards(model, cache, prompts(2, 1), prompts(2, 1))
        assert watch.stats()["forwards"] == 4
    expect_clean(watch)


def test_lengths_of_rows_are_made_ahead() -> None:
    """Whatever length comes next, it is right."""
    lengths = RowLengths(3, torch.device("cpu"))
    for length in (0, 7, 8, 7 + AHEAD, 8 + AHEAD, 2, 3):
        assert lengths.of(length).tolist() == [length] * 3
        assert lengths.of(length).is_contiguous()
    assert lengths.new(1) is lengths.new(1)
    assert lengths.new(2).tolist() == [2] * 3
