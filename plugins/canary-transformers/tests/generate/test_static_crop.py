"""Static layers that roll back in place (Transformers 5.24), and K and V of different types."""

from typing import Any

import pytest
import torch
from tiny.generation import expect_clean, flip, forwards, listening, new_cache, prompts
from tiny.models import generating
from transformers.cache_utils import DynamicCache, StaticCache, StaticLayer

pytestmark = pytest.mark.usefixtures("one_thread")

needs_crop = pytest.mark.skipif(
    not getattr(StaticLayer, "is_croppable", False), reason="static layers do not roll back before Transformers 5.24"
)


@needs_crop
@pytest.mark.parametrize("same", [True, False], ids=["the same tokens", "others"])
def test_a_static_cache_is_rolled_back_in_place(same: bool) -> None:
    """Stale states stay where they are until they are overwritten, by the same tokens or by others: no alarm, and a
    flip in what is left is found."""
    model, ids = generating("llama"), prompts(2, 9)
    again = ids[:, 6:] if same else prompts(2, 3) + 1
    plain = new_cache(model, "static")
    forwards(model, plain, ids)
    plain.crop(-3)
    expected = forwards(model, plain, again)[0]
    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "static")
        forwards(model, cache, ids)
        cache.crop(-3)
        assert torch.equal(forwards(model, cache, again)[0], expected)
        forwards(model, cache, prompts(2, 1))
        expect_clean(watch)
        assert [e.name for e in findings.events if e.level != "info"] == []
        flip(cache, 1, "values", row=0, index=4)
        forwards(model, cache, prompts(2, 1))
        assert {v.source for v in watch.violations} == {"v.1"}


@needs_crop
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("new", [1, 5])
def test_a_static_window_that_has_moved_on_does_not_come_back(tokens: int, new: int) -> None:
    """What it gave up is gone, and Transformers reads each token as one before it, with no error: told before the next
    forward, also where no token is missing that is still read."""
    model = generating("mistral")
    ids, more = prompts(1, 10 + tokens), prompts(1, new)
    (expected,) = forwards(model, new_cache(model, "dynamic"), torch.cat([ids[:, :10], more], dim=1))
    watch, _ = listening(model)
    with watch:
        cache = new_cache(model, "static")
        forwards(model, cache, ids)
        expect_clean(watch)
        cache.crop(-tokens)
        (answered,) = forwards(model, cache, more)
        assert not torch.allclose(answered[:, -1], expected[:, -1], atol=1e-2)
        assert {v.kind.name for v in watch.violations} == {"POSITION"}


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_keys_and_values_may_be_of_different_types(kind: type) -> None:
    """As where values are kept in half precision: each is guarded in its own."""
    model = generating("llama")
    cache = new_cache(model, "static" if kind is StaticCache else "dynamic")
    update = cache.update

    def halved(keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        """Values are kept in half precision; attention gets them as it wants them."""
        kept, half = update(keys, values.to(torch.float16), *args, **kwargs)
        return kept, half.to(keys.dtype)

    cache.update = halved
    watch, findings = listening(model)
    with watch:
        for chunk in (prompts(2, 7), prompts(2, 1), prompts(2, 1)):
            try:
                forwards(model, cache, chunk)
            except RuntimeError as error:
                pytest.skip(f"static layers keep both in one type before Transformers 5.24: {error}")
        expect_clean(watch)
        if cache.layers[0].keys.dtype == cache.layers[0].values.dtype:
            pytest.skip("layers keep both in one type before Transformers 5.24")
        flip(cache, 2, "keys", row=1, index=2)
        forwards(model, cache, prompts(2, 1))
        assert {v.source for v in watch.violations} == {"k.2"}
        assert [e.name for e in findings.events if e.level == "error" and e.name not in ("incident", "diagnosis")] == []
