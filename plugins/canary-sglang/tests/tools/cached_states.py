"""Recurrent states that SGLang's prefix cache holds."""

from typing import Any

import torch

from canary_core.records import POSITION, STATES, State
from tools.traffic import serve


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
