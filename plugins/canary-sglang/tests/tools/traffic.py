"""Requests that an engine serves to their end, or until they decode."""

import time
from collections.abc import Sequence
from typing import Any

STORAGE_PATIENCE_S = 0.01
"""How long an idle turn leaves to SGLang's threads that read from a storage back end."""


def serve(
    engine: Any,
    prompts: list[list[int]],
    new_tokens: int,
    together: int = 3,
    namespaces: Sequence[str | None] = (None,),
) -> dict[str, Any]:
    """Serves the prompts, ``together`` at a time join every few steps; gives outputs, cached tokens, steps, and how
    many of each forward mode were replayed from a CUDA graph. ``namespaces`` of the prefix cache take turns."""
    first, waiting = len(engine.requests), list(prompts)
    before = engine.steps
    engine.graphed.clear()
    for turn in range(5001):
        if waiting and turn % 4 == 0:
            for prompt in waiting[:together]:
                engine.submit(prompt, new_tokens, namespace=namespaces[len(engine.requests) % len(namespaces)])
            waiting = waiting[together:]
        idle = not engine.step()
        if idle and not waiting and all(r.finished() for r in engine.requests[first:]):
            break
        if idle and getattr(engine.scheduler, "enable_hicache_storage", False):
            time.sleep(STORAGE_PATIENCE_S)
    else:
        raise RuntimeError("the traffic does not end")
    served = engine.requests[first:]
    return {
        "outputs": [list(r.output_ids) for r in served],
        "cached": [int(r.cached_tokens) for r in served],
        "retracted": sum(int(getattr(r, "retraction_count", 0) or 0) for r in served),
        "steps": engine.steps - before,
        "graphed": dict(engine.graphed),
        "verifies": sum(r.spec_verify_ct for r in served),
    }


def decoding(engine: Any, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    """The prompts' requests, together, once each of them has more than its first token."""
    first = len(engine.requests)
    for prompt in prompts:
        engine.submit(prompt, new_tokens)
    served = engine.requests[first:]
    while not all(len(r.output_ids) > 1 for r in served):
        engine.step()
    return served


def flush(engine: Any) -> bool:
    """Empties the prefix cache, as a client may ask for at any time."""
    return bool(engine.scheduler.flush_cache())


def lost_slots(scheduler: Any) -> int:
    """Slots of an idle engine that are neither free nor in the prefix cache, by SGLang's own counts."""
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    windows = cache.supports_swa()
    free = allocator.full_available_size() if windows else allocator.available_size()
    cached = cache.full_evictable_size() if windows else cache.evictable_size()
    lost = int(scheduler.max_total_num_tokens - free - cached)
    states = getattr(scheduler.req_to_token_pool, "mamba_allocator", None)
    if states is None:
        return lost
    parked = cache.mamba_evictable_size() if cache.supports_mamba() else 0
    return lost + int(states.size - states.available_size() - parked)
