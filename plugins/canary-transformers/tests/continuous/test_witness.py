"""The witness of continuous batching: what the engine's scheduler says it computes, against what was recorded."""

from collections.abc import Callable
from typing import Any

import pytest
from tiny.batching import Traffic, serve
from tiny.models import batching
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from canary_core.testing import Findings

TRAFFIC = {
    "plenty": Traffic(),
    "tight": Traffic(seed=3, pages=14, requests=12),
    "forks": Traffic(seed=1, samples=2),
}


def watched(kind: str, guard: Callable[..., Any]) -> tuple[Any, Any, Findings]:
    """A model, its guard, and what that tells."""
    model, findings = batching(kind), Findings()
    watch = guard(model)
    watch.register(findings)
    return model, watch, findings


@pytest.mark.parametrize("traffic", TRAFFIC)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_every_token_that_was_scheduled_is_guarded(kind: str, traffic: str, guard: Callable[..., Any]) -> None:
    """Exactly, whatever is preempted or forked. Of tokens that a window has passed at once nothing is kept."""
    model, watch, findings = watched(kind, guard)
    serve(model, TRAFFIC[traffic])
    stats = watch.stats()
    assert stats["computed_tokens"] == stats["guarded_tokens"] > 100
    assert [event for event in findings.events if event.name == "unguarded_tokens"] == []


def test_a_hook_that_is_bypassed_is_told(guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that calls its runner's own function, past the one that was put there: it serves on, with the same
    answers; when it ends at the latest, what the scheduler has counted is told to be unseen."""
    expected = serve(batching("llama"), Traffic())
    model, watch, findings = watched("llama", guard)
    original = ContinuousBatchProcessor._generation_step

    def bypassing(processor: Any, model: Any) -> None:
        runner = processor.model_runner
        hooked = runner.compute_batch
        runner.compute_batch = type(runner).compute_batch.__get__(runner)
        try:
            original(processor, model)
        finally:
            runner.compute_batch = hooked

    monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", bypassing)
    assert serve(model, Traffic()) == expected
    (told,) = [event.fields for event in findings.events if event.name == "unguarded_tokens"]
    assert told["missing_tokens"] == told["computed_tokens"] > 100
    assert watch.stats()["guarded_tokens"] == 0
