"""Forwards of continuous batching, which the device has before the host works for Canary. Here on a CPU, where Canary
never runs beside a forward: it is told that it may, so order and bookkeeping are real, and streams are not."""

from collections.abc import Iterator
from typing import Any

import pytest
from canary_transformers.continuous.batch import ContinuousBatch
from canary_transformers.continuous.session import Session
from tiny.batching import Traffic, serve
from tiny.models import batching

from canary_core.guard.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

TIGHT = {"pages": 12, "batch_tokens": 24, "requests": 9, "new_tokens": 14}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happened one after the other: ``ask``, ``forward``, ``view``, and ``join`` before other copies."""
    told: list[str] = []
    asked, view, moving = Step.issues_first, ContinuousBatch.view, Session.moving

    def issues_first(step: Step, overlap: Any) -> bool:
        asked(step, overlap)
        told.append("ask")
        return True

    def viewed(batch: ContinuousBatch, forward: Any) -> Any:
        told.append("view")
        return view(batch, forward)

    def joined(session: Session) -> None:
        told.append("join")
        moving(session)

    monkeypatch.setattr(Step, "issues_first", issues_first)
    monkeypatch.setattr(ContinuousBatch, "view", viewed)
    monkeypatch.setattr(Session, "moving", joined)
    hooks = [batching(kind).register_forward_hook(lambda *_: told.append("forward")) for kind in ("llama", "gemma3")]
    yield told
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_forward_is_checked_once_it_was_issued(kind: str, samples: int, guard: Any, order: list[str]) -> None:
    """Under pressure, with forks: nothing is found, and answers stay what they were. Before blocks are copied, what
    runs beside is waited for."""
    load = Traffic(samples=samples, **TIGHT)
    bare = serve(batching(kind), load)
    order.clear()
    guarded = guard(batching(kind), read_check=0)
    assert serve(batching(kind), load) == bare
    assert guarded.violations == []
    forwards = [what for what in order if what != "join"]
    assert forwards == ["ask", "forward", "view"] * (len(forwards) // 3)
    assert guarded.stats()["forwards"] == len(forwards) // 3
    assert guarded.stats()["recorded_slots"] > 0
    assert ("join" in order) == (samples > 1)


def test_a_forward_that_fails_after_it_was_begun(guard: Any, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded of it, no view is made, and Canary goes on with the next requests."""
    model, guarded = batching("llama"), guard(batching("llama"), read_check=0)
    load = Traffic(requests=3)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        serve(model, load)
    hook.remove()
    assert "view" not in order
    serve(model, load)
    assert guarded.violations == []
    assert guarded.stats()["forwards"] > 0
