"""How often the host waits for the device."""

from typing import Any

from tools.traffic import flush, serve

WAITS = frozenset(
    f"cuda{call}"
    for call in (
        "StreamSynchronize",
        "DeviceSynchronize",
        "EventSynchronize",
        "Malloc",
        "MallocAsync",
        "Free",
        "Memcpy",
    )
)
"""Functions of the CUDA runtime that wait for the device, or may."""


def waits(engine: Any, prompts: list[list[int]], new_tokens: int, guarded: bool) -> dict[str, int]:
    """Serves the prompts twice from an empty cache; gives how often the host waited for the device or allocated its
    memory the second time, by function of the CUDA runtime. ``guarded``: False takes the guard away meanwhile."""
    from torch.profiler import ProfilerActivity, profile

    flush(engine)
    for canary in engine.canaries:
        canary._switch.enabled = guarded
    # A flush gives the device's memory back, so the first round allocates it again.
    serve(engine, prompts, new_tokens)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        serve(engine, prompts, new_tokens)
    for canary in engine.canaries:
        canary._switch.enabled = True
    # Nothing is known of what was written without us.
    flush(engine)
    return {e.key: e.count for e in trace.key_averages() if e.key in WAITS}
