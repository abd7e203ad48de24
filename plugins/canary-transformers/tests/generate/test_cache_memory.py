"""A cache under guard takes no more of the engine's memory than one without: nothing keeps what is given up."""

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from tiny.generation import expect_clean, flip, forwards, generate, listening, new_cache, prompts
from tiny.models import generating
from transformers import Cache

from canary_core import Canary, hookimpl

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_cycles() -> Iterator[None]:
    """Memory that only the garbage collector gives back stays taken."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_cycles")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("findings", [False, True])
def test_a_forward_gives_back_each_layer_s_old_tensors(name: str, findings: bool) -> None:
    """By its end none of them is there, also where bytes were found wrong, and also after the room for tokens had to be
    doubled."""
    model = generating(name)
    cache = new_cache(model, "dynamic")
    left: list[int] = []
    before: list[Any] = []
    model.model.layers[-1].register_forward_hook(lambda *_: left.append(sum(there() is not None for there in before)))
    watch, _ = listening(model)
    with watch:
        for chunk in (prompts(2, 11), *[prompts(2, 1)] * 4, prompts(2, 120), prompts(2, 1), prompts(2, 1)):
            before[:] = [
                ref(t.untyped_storage())
                for layer in cache.layers
                if layer.is_initialized
                for t in (layer.keys, layer.values)
            ]
            if findings and before:
                flip(cache, 1, "values", row=1, index=-1)
            forwards(model, cache, chunk)
        assert bool(watch.violations) == findings
    assert left == [0] * 8


@pytest.mark.usefixtures("no_cycles")
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}])
def test_after_generate_nothing_of_its_cache_is_left(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not for the garbage collector to give it back."""
    model = generating("llama")
    seen: list[Any] = []
    update = Cache.update

    def noted(cache: Any, *args: Any, **kwargs: Any) -> Any:
        output = update(cache, *args, **kwargs)
        seen.extend(ref(layer.keys.untyped_storage()) for layer in cache.layers if layer.is_initialized)
        return output

    monkeypatch.setattr(Cache, "update", noted)
    with listening(model)[0] as watch:
        generate(model, prompts(), **how)
        if hasattr(model, "_cache"):
            del model._cache  # Transformers keeps a static cache for the next call.
        assert len(seen) > 30
        assert [there for there in seen if there() is not None] == []
    expect_clean(watch)


@pytest.mark.usefixtures("no_cycles")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_after_generate_nothing_of_canary_s_own_memory_is_left(kind: str) -> None:
    """Nor of what a cache had before its room was doubled: the next cache's may lie where it was."""
    model = generating("llama")
    records: list[torch.Tensor] = []

    class Attached:
        @hookimpl
        def canary_attached(self, canary: Canary) -> None:
            records.extend(t for state in canary.states.values() for t in (state.records, state.fingerprints))

    watch, _ = listening(model)
    watch.register(Attached())
    with watch:
        for new in (4, 140):
            generate(model, prompts(), cache_implementation=kind, disable_compile=True, max_new_tokens=new)
            if hasattr(model, "_cache"):
                del model._cache  # Transformers keeps a static cache for the next call.
            assert [t for t in records if t.untyped_storage().nbytes()] == []
    assert len(records) == (6 if kind == "dynamic" else 4)
    expect_clean(watch)


@pytest.mark.usefixtures("no_cycles")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("move", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_beams_that_change_places_leave_no_old_tensors(name: str, move: str) -> None:
    """Each layer's go when its new ones are made."""
    model = generating(name)
    watch, _ = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9), prompts(2, 1), prompts(2, 1))
        before = [ref(t.untyped_storage()) for layer in cache.layers for t in (layer.keys, layer.values)]
        getattr(cache, move)(2 if move == "batch_repeat_interleave" else torch.tensor([1, 0]))
        assert [there for there in before if there() is not None] == []
        forwards(model, cache, prompts(len(cache.layers[0].keys), 1))
        expect_clean(watch)
        flip(cache, 1, "keys", row=1, index=6)
        forwards(model, cache, prompts(len(cache.layers[0].keys), 1))
        assert {(v.source, v.kind.name) for v in watch.violations} == {("k.1", "BYTES")}


@pytest.mark.parametrize("close", [False, True])
def test_a_finding_of_a_forward_that_fails_halfway_is_told(close: bool) -> None:
    """Nothing reads what some layers have given up by then: the finding has a diagnosis without their bytes, and the
    next forward is told that the layers do not agree."""
    model = generating("llama")

    def fail(*_: Any) -> None:
        raise MemoryError("no memory left")

    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        forwards(model, cache, prompts(2, 9), prompts(2, 1))
        flip(cache, 1, "keys", row=0, index=4)
        handle = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(MemoryError):
            forwards(model, cache, prompts(2, 1))
        handle.remove()
        if close:
            del cache
        else:
            forwards(model, cache, prompts(2, 1))
    assert {(v.source, v.position) for v in findings.violations if v.kind.name == "BYTES"} == {("k.1", 4)}
    told = [e.name for e in findings.events]
    assert "disabled" not in told
    assert "diagnosis" in told
    assert ("cache_layers_disagree" in told) != close
