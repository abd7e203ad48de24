"""The witness of `generate()`: what its answers say was computed, against what was recorded. And engines that are
broken from outside, so that forwards run past the hooks."""

from typing import Any

import pytest
import torch
from tiny.generation import CACHE, LOOP, expect_clean, forwards, generate, listening, new_cache, prompts
from tiny.models import generating
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "beams, several returned": {"num_beams": 2, "num_return_sequences": 2},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "drafts from the prompt": {"prompt_lookup_num_tokens": 3},
    "prompt in chunks": {"prefill_chunk_size": 4},
}


def told(findings: Any, name: str) -> list[dict[str, Any]]:
    """Fields of the events of that name."""
    return [event.fields for event in findings.events if event.name == name]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_every_token_that_an_answer_needs_is_guarded(kind: str, way: str) -> None:
    """Exactly: as many as were recorded, and nothing is told. Of tokens that a window has passed at once nothing is
    kept, so they do not count."""
    model, ids = generating(kind), LOOP if "drafts" in way else prompts()
    watch, findings = listening(model)
    with watch:
        generate(model, ids, **WAYS[way])
        stats = watch.witness.stats()
        expect_clean(watch)
    assert stats["computed_tokens"] == stats["guarded_tokens"] > 20
    assert stats["guarded_ratio"] == 1
    assert told(findings, "unguarded_tokens") == told(findings, "unguarded_forward") == []


def test_a_cache_that_is_given_again_counts_what_is_new() -> None:
    """A second answer goes on from the first one's cache; direct calls count, too."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        cache = new_cache(model, "dynamic")
        first = generate(model, prompts(1), cache=cache, max_new_tokens=5)
        generate(model, torch.cat([first, prompts(1)], dim=1), cache=cache, max_new_tokens=5)
        forwards(model, new_cache(model, "dynamic"), prompts(2, 4), prompts(2, 1))
        stats = watch.witness.stats()
    assert stats["computed_tokens"] == stats["guarded_tokens"] == 11 + 4 + 1 + 11 + 4 + 2 * 5
    assert told(findings, "unguarded_tokens") == []


def test_a_draft_model_that_is_not_guarded_does_not_count() -> None:
    """Its forwards are none of the guarded model's."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        model.generate(
            prompts(1), assistant_model=generating("mistral"), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        stats = watch.witness.stats()
    assert stats["computed_tokens"] == stats["guarded_tokens"]
    assert told(findings, "unguarded_tokens") == []


def test_no_cache_leaves_nothing_to_guard() -> None:
    """`use_cache=False`: neither computed nor missing."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        generate(model, prompts(), use_cache=False)
        assert watch.witness.missing == 0
        assert watch.witness.stats() == {}
    assert told(findings, "unguarded_forward") == []


def test_a_hook_that_is_bypassed_is_told_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model class that calls its modules in a way of its own: no forward is seen. The answer is what it was, and its
    length says how many tokens were computed."""
    model = generating("llama")
    expected = generate(model, prompts())
    watch, findings = listening(model)
    with watch:
        monkeypatch.setattr(type(model), "__call__", torch.nn.Module.__call__, raising=False)
        assert torch.equal(generate(model, prompts()), expected)
        (event,) = told(findings, "unguarded_tokens")
        assert (event["missing_tokens"], event["guarded_tokens"]) == (2 * (11 + 11), 0)
        assert "hooks" in event["reason"]


def test_a_hook_that_is_lost_on_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same after answers that were guarded: once more tokens are missing than were told of."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        generate(model, prompts())
        assert told(findings, "unguarded_tokens") == []
        monkeypatch.setattr(type(model), "__call__", torch.nn.Module.__call__, raising=False)
        generate(model, prompts())
        generate(model, prompts())
    assert [event["missing_tokens"] for event in told(findings, "unguarded_tokens")] == [44, 88]


class RenamedModel(LlamaForCausalLM):
    """A model of one's own, whose forward has another name for its cache."""

    def forward(self, input_ids: Any = None, memory: Any = None, **kwargs: Any) -> Any:
        """Hands it on under the usual name."""
        return super().forward(input_ids, **{CACHE: memory}, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Renames it."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return {"memory" if name == CACHE else name: value for name, value in inputs.items()}


def test_an_argument_of_another_name_is_found() -> None:
    """The cache is looked for among all arguments, and guarded in each forward."""
    model = RenamedModel(generating("llama").config).eval()
    watch, findings = listening(model)
    with watch:
        generate(model, prompts())
        stats = watch.witness.stats()
        assert watch.stats()["forwards"] >= 12
        expect_clean(watch)
    assert stats["computed_tokens"] == stats["guarded_tokens"] == 44
    assert told(findings, "unguarded_forward") == []


class RenamedTokens(LlamaForCausalLM):
    """A model of one's own, whose forward has another name for its tokens."""

    def forward(self, words: Any = None, **kwargs: Any) -> Any:
        """Hands them on under the usual name."""
        return super().forward(words, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Renames them."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return {"words" if name == "input_ids" else name: value for name, value in inputs.items()}


def test_tokens_of_another_name_are_told() -> None:
    """The answer is what it was; one sentence says which model is not guarded, and the witness how much."""
    model = RenamedTokens(generating("llama").config).eval()
    expected = generate(model, prompts())
    watch, findings = listening(model)
    with watch:
        assert torch.equal(generate(model, prompts()), expected)
    (event,) = told(findings, "unguarded_forward")
    assert event["forward"] == "RenamedTokens"
    assert "words) is named input_ids" in event["reason"]
    assert [e["missing_tokens"] for e in told(findings, "unguarded_tokens")] == [44]


class OwnCache(DynamicCache):
    """A cache with an update of its own, whose layout nobody else can know."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """As the usual one, in truth."""
        return super().update(*args, **kwargs)


def test_a_cache_that_can_not_be_followed_is_told_once() -> None:
    """With its name; its tokens are counted as unguarded for that reason."""
    model = generating("llama")
    watch, findings = listening(model)
    with watch:
        for _ in range(2):
            generate(model, prompts(), cache=OwnCache(config=model.config))
        stats = watch.witness.stats()
    (event,) = told(findings, "unguarded_forward")
    assert "its cache is a OwnCache" in event["reason"]
    assert stats["unguarded_no_cache_tokens"] == stats["computed_tokens"] > 0
    assert stats["guarded_ratio"] == 0
    assert told(findings, "unguarded_tokens") == []
