"""Faults of the core, injected through its own syntax, and one of our own."""

from typing import Any

from canary_core import plugins, testing
from canary_core.records import STEP_WRITTEN
from tools.bit_flips import scrub
from tools.traffic import serve

FAULTS = (
    "req_to_token", "real_kv_used", "real_kv_unused_cache", "real_kv_post_forward", "lost_write", "stray_write",
    "swap_pages", "next_token_swap",
)  # fmt: skip
"""All of the core's."""


def inject(engine: Any, text: str, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Serves with the faults of ``text``, as ``CANARY_FAULTS`` names them; gives what was injected, whether each
    was found as what it is, whether all its slots were written again since, and everything that was found."""
    injector = testing.FaultInjector.parse(text, seed=1)
    plugins.hook_manager().register(injector)
    try:
        serve(engine, prompts, new_tokens)
    finally:
        plugins.hook_manager().unregister(injector)
    scrub(engine, prompts[0][:3])
    for canary in engine.canaries:
        canary.drain()
    states = engine.states
    found, engine.told.violations = engine.told.violations, []
    return {
        "injections": [i.fields() for i in injector.injections],
        "explained": [any(i.explains(v) for v in found) for i in injector.injections],
        "rewritten": [
            all(int(states[i.region].records[slot, STEP_WRITTEN]) > i.step for slot in i.slots)
            for i in injector.injections
        ],
        "violations": [v.fields() for v in found],
    }


def break_us(engine: Any) -> None:
    """Makes the next of our own calls raise."""

    def broken(*args: Any) -> None:
        raise RuntimeError("broken on purpose")

    engine.session._batches.view = broken
