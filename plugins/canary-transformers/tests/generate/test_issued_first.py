"""Static caches, whose forwards the device has before the host works for Canary. Here on a CPU, where Canary never runs
beside a forward: it is told that it may, so order and bookkeeping are real, and streams are not. Those are in `gpu`."""

from collections.abc import Iterator
from typing import Any

import pytest
from canary_transformers.generate.records import CacheRecords
from tiny.generation import expect_clean, flip, forwards, generate, listening, new_cache, prompts
from tiny.models import generating

from canary_core import Kind
from canary_core.guard.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")


class Order:
    """What happened one after the other: ``ask``, ``forward`` and ``check``."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        asked, check = Step.issues_first, CacheRecords.check

        def issues_first(step: Step, overlap: Any) -> bool:
            asked(step, overlap)
            self.told.append("ask")
            return True

        def checked(records: CacheRecords, *args: Any) -> None:
            self.told.append("check")
            check(records, *args)

        patch.setattr(Step, "issues_first", issues_first)
        patch.setattr(CacheRecords, "check", checked)
        self._hook = model.register_forward_hook(lambda *_: self.told.append("forward"))

    def close(self) -> None:
        """The model is as it was."""
        self._hook.remove()


@pytest.fixture
def model() -> Any:
    """A llama."""
    return generating("llama")


@pytest.fixture
def order(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """Of the model's forwards."""
    order = Order(model, monkeypatch)
    yield order
    order.close()


def found_in(watch: Any) -> set[tuple[object, ...]]:
    """Kind, layer, half, request and position of each finding."""
    return {(v.kind, v.layer, v.half, v.stored_request, v.stored_position) for v in watch.violations}


def test_a_static_cache_is_checked_once_the_forward_was_issued(model: Any, order: Order) -> None:
    """The prompt begins the guard; of the second forward it is first seen that nothing has changed."""
    with listening(model, read_check=0)[0] as watch:
        generate(model, prompts(), cache_implementation="static", disable_compile=True, max_new_tokens=6)
        stats = watch.stats()
    assert order.told == ["forward", *["ask", "forward", "check"] * 5]
    assert stats["forwards"] == 6
    assert stats["checked_slots"] > 0
    expect_clean(watch)


def test_a_cache_that_grows_is_checked_before(model: Any, order: Order) -> None:
    """A forward makes other tensors there."""
    with listening(model, read_check=0)[0] as watch:
        generate(model, prompts(), max_new_tokens=4)
    assert order.told == ["forward", *["check", "forward"] * 3]
    expect_clean(watch)


def test_a_flipped_bit_is_found(model: Any, order: Order) -> None:
    """By the scrub, after a while: to look at bytes before each forward is to look before it is issued."""
    with listening(model, read_check=0)[0] as watch:
        cache = new_cache(model, "static")
        forwards(model, cache, prompts(2, 5), *(prompts(2, 1) for _ in range(4)))
        expect_clean(watch)
        flip(cache, 1, "values", row=1, index=6)
        forwards(model, cache, *(prompts(2, 1) for _ in range(24)))
    assert order.told[-3:] == ["ask", "forward", "check"]
    assert found_in(watch) == {(Kind.BYTES, 1, "v", "generate 1 row 1", 6)}


def test_tensors_that_got_other_memory_are_followed(model: Any, order: Order) -> None:
    """They are the same objects, and the forward is issued first. What Canary reads after it is where they are now."""
    with listening(model, read_check=0)[0] as watch:
        cache = new_cache(model, "static")
        forwards(model, cache, prompts(2, 5), prompts(2, 1), prompts(2, 1))
        for layer in cache.layers:
            old = layer.keys.data
            layer.keys.data = old.clone()
            old.zero_()
        forwards(model, cache, *(prompts(2, 1) for _ in range(8)))
        expect_clean(watch)
        flip(cache, 1, "keys", row=1, index=6)
        forwards(model, cache, *(prompts(2, 1) for _ in range(16)))
    assert found_in(watch) == {(Kind.BYTES, 1, "k", "generate 1 row 1", 6)}


def test_a_forward_that_fails_after_it_was_begun(model: Any, order: Order) -> None:
    """Nothing is recorded of it, and the next one is checked again."""
    with listening(model, read_check=0)[0] as watch:
        cache = new_cache(model, "static")
        forwards(model, cache, prompts(2, 5), prompts(2, 1))

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        hook = model.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            forwards(model, cache, prompts(2, 1))
        hook.remove()
        forwards(model, cache, prompts(2, 1), prompts(2, 1))
        assert watch.stats()["forwards"] == 4
    assert order.told == ["forward", "ask", "forward", "check", "ask", *["ask", "forward", "check"] * 2]
    expect_clean(watch)


def test_a_caller_may_write_its_next_tokens_where_the_last_ones_were(model: Any, order: Order) -> None:
    """As loops over a static buffer do. What the record reads is a copy."""
    with listening(model, read_check=0)[0] as watch:
        cache, tokens = new_cache(model, "static"), prompts(2, 1)
        forwards(model, cache, prompts(2, 5), tokens)
        seen = []
        original = CacheRecords.record

        def record(records: CacheRecords, *args: Any) -> None:
            seen.append(records._view.token_ids.data_ptr())
            original(records, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CacheRecords, "record", record)
            for _ in range(3):
                tokens.copy_(forwards(model, cache, tokens)[0][:, -1:].argmax(-1))
    assert len(seen) == 3
    assert tokens.data_ptr() not in seen
    expect_clean(watch)
