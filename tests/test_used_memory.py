"""Engines whose pool is not cleared: in memory that an earlier engine gave back lies its KV of the same prompts."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import Kind

PROMPT = [11, 7, 3, 9, 5, 2]


def on_memory_of(earlier: ToyEngine) -> ToyEngine:
    """Another engine of the same sort, whose pool begins with all that the earlier one has left."""
    engine = ToyEngine(window=earlier.window)
    for half in ("k", "v", "window_kv"):
        for new, old in zip(getattr(engine, half), getattr(earlier, half), strict=True):
            new.copy_(old)
    return engine


def serve(guarded: Guarded, forwards: int = 4) -> None:
    """A prefill and some decodes of the prompt."""
    guarded.engine.submit("a", PROMPT)
    guarded.step()
    for _ in range(forwards):
        guarded.decode()


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize(
    "settings", [{}, {"mode": "raise"}, {"profile": "hunt"}, {"read_check": -1}, {"mode": "raise", "audit": 4}]
)
def test_the_same_prompts_over_and_over_are_silent(settings, window):
    """Each first write leaves the bytes that were there, and is no lost write: memory that nobody has written proves
    nothing, neither for a slot nor for the whole pool."""
    engine = ToyEngine(window=window)
    for _ in range(8):
        tensors = engine.pool_tensors if "audit" in settings else None
        guarded = Guarded(engine, pool_tensors=tensors, **settings)
        serve(guarded)
        guarded.canary.close()
        assert guarded.violations == []
        told = [event for event in guarded.findings.events if event.level in ("warning", "error")]
        assert [event.name for event in told if event.name != "summary"] == []
        engine = on_memory_of(engine)


@pytest.mark.parametrize("filled", ["zeros", "used"])
def test_a_lost_write_is_found_where_it_can_be_proven(filled):
    """In a cleared pool the first one; else from the second write of a slot on."""
    engine = ToyEngine()
    if filled == "used":
        for tensor in (*engine.k, *engine.v):
            tensor.copy_(torch.randn(tensor.shape))
    guarded = Guarded(engine, read_check=-1)

    def lose() -> None:
        kept, forward = engine.v[1].clone(), engine.forward

        def lost(batch):
            forward(batch)
            engine.v[1].copy_(kept)
            engine.forward = forward

        engine.forward = lost

    def request(name: str, tokens: list[int]):
        made = engine.submit(name, tokens)
        guarded.step()
        return made

    if filled == "used":
        first = request("first", PROMPT)
        guarded.canary.slots.free("full", torch.tensor(first.slots))
        engine.requests.remove(first)
        engine.free = [*first.slots, *engine.free]
    lose()
    request("second", [token + 1 for token in PROMPT])
    guarded.canary.drain()
    lost = [v for v in guarded.violations if v.kind is Kind.LOST_WRITE]
    assert len(lost) == len(PROMPT)
    assert {v.source for v in lost} == {"v.1"}
