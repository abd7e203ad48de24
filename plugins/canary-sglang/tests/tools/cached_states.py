"""Recurrent states that SGLang's prefix cache holds."""

import random
from typing import Any

import torch

from canary_core.records import POSITION, STATES, State
from tools.parked_flips import flip_state, looked_up_state
from tools.traffic import decoding, lost_slots, serve


def cached_states(engine: Any) -> list[dict[str, Any]]:
    """Each one's slot, how many tokens are in it (0 if that isn't known), and whether its bytes are known."""
    engine.session.canary.drain()
    state = engine.states["mamba"]
    words = state.records[:, POSITION]
    return [
        {
            "slot": slot,
            "tokens": int(words[slot]) // STATES + 1 if words[slot] % STATES == State.WRITTEN else 0,
            "bytes": bool((state.fingerprints[slot] != 0).all()),
        }
        for slot in engine.scheduler.tree_cache.all_mamba_values_flatten().tolist()
    ]


def reuse_wrong_state(engine: Any, slot: int, prompt: list[int]) -> None:
    """Serves ``prompt``, for which SGLang reuses the state in ``slot`` in place of the one that it has found."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    collect = ScheduleBatch._collect_deferred_mamba_cow_and_clear

    def wrong(batch: Any, *args: Any) -> None:
        collect(batch, *args)
        batch.mamba_cow_src_indices = torch.full_like(batch.mamba_cow_src_indices, slot)

    ScheduleBatch._collect_deferred_mamba_cow_and_clear = wrong
    try:
        serve(engine, [prompt], 1)
    finally:
        ScheduleBatch._collect_deferred_mamba_cow_and_clear = collect


def share_broken_state(engine: Any, begin: list[int], prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Serves ``begin``, then three prompts that begin with it: while the first one, which has gone on from the state
    that the prefix cache has of it, decodes, a bit of that state flips, and the second one goes on from there; the
    third one comes after both. Gives answers, how each ended, which events were told, and slots that were lost."""
    serve(engine, [begin], 1)
    told = len(engine.told.events)
    (first,) = decoding(engine, prompts[:1], new_tokens)
    hit = int(first.cached_tokens)
    second = engine.submit(prompts[1], new_tokens)
    second.init_next_round_input(engine.scheduler.tree_cache)
    slot = looked_up_state(engine.scheduler, second)
    flip_state(engine.runner.req_to_token_pool.mamba_pool, slot, random.Random(1))
    while not (first.finished() and second.finished()):
        engine.step()
    serve(engine, prompts[2:], new_tokens)
    served = [first, second, engine.requests[-1]]
    return {
        "hit": hit,
        "outputs": [list(request.output_ids) for request in served],
        "reasons": [request.finished_reason.to_json()["type"] for request in served],
        "requests": [request.rid for request in served],
        "events": [(event.name, dict(event.fields)) for event in engine.told.events[told:]],
        "lost": lost_slots(engine.scheduler),
    }
