"""Engines that are broken from outside so that Canary is no longer called, or no longer told."""

import time
from typing import Any


def bypass(engine: Any, function: str) -> None:
    """As a runner, or scheduler, of somebody's own whose path leads past the function that is hooked: from now on it
    calls what the hook wraps."""
    owner = {"forward": engine.runner, "run_batch": engine.scheduler}[function]
    inner = getattr(type(owner), function).__wrapped__
    setattr(owner, function, lambda *args, **kwargs: inner(owner, *args, **kwargs))


def lose(engine: Any, method: str) -> None:
    """The hook of one of the allocator's functions is gone: what it would tell gets lost."""
    kind = type(engine.scheduler.token_to_kv_pool_allocator)
    setattr(kind, method, getattr(kind, method).__wrapped__)


def serve_until_told(engine: Any, event: str, seconds: float, prompts: list[list[int]]) -> float | None:
    """Serves ``prompts`` again and again until an event of this name is told; how many seconds that took, None for
    never."""
    from tools import traffic

    began = time.monotonic()
    while time.monotonic() - began < seconds:
        traffic.serve(engine, prompts, 8)
        if any(told.name == event for told in engine.told.events):
            return time.monotonic() - began
        time.sleep(0.2)
    return None
