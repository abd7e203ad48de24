"""Bugs of a running SGLang, by its own allocator and prefix cache, for what findings say of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tools.traffic import decoding, flush, serve

PROMPTS = [[(number * i) % 200 + 3 for i in range(20)] for number in (7, 11)]


def mechanism(engine: Any, name: str) -> dict[str, Any]:
    """Runs the mechanism of this name; gives the findings, what was diagnosed, and the name of the request to which it
    happens, whose first tokens were computed at step ``written``."""
    about = HOW[name](engine)
    engine.session.canary.drain()
    found, engine.told.violations = engine.told.violations, []
    diagnoses = [i.diagnoses[0].name for i in engine.session.canary.incidents if i.diagnoses]
    return {**about, "violations": [v.fields() for v in found], "diagnoses": diagnoses}


def _freed(engine: Any, then: Callable[[Any, Tensor], None]) -> dict[str, Any]:
    """Slots of a running request are given back, ``then`` happens, and it decodes on."""
    from canary_sglang.compat.schedulers import table_row

    victim, _ = decoding(engine, PROMPTS, 30)
    row, _ = table_row(engine.scheduler, victim)
    slots = row[3:6].to(torch.int64).clone()
    engine.session.canary.slots.settle()
    written = int(engine.states["full"].records[int(slots[0]), 4])
    allocator = engine.scheduler.token_to_kv_pool_allocator
    allocator.free(slots.clone())
    then(allocator, slots)
    engine.step()
    return {"victim": victim.rid, "written": written, "slots": slots.tolist()}


def use_after_free(engine: Any) -> dict[str, Any]:
    """Nobody is given them yet."""
    return _freed(engine, lambda allocator, slots: None)


def handed_out_again(engine: Any) -> dict[str, Any]:
    """They are handed out again, and not written yet."""

    def then(allocator: Any, slots: Tensor) -> None:
        every = allocator.alloc(allocator.available_size()).clone()
        allocator.free(every[~torch.isin(every, slots)])

    return _freed(engine, then)


def stale_match(engine: Any) -> dict[str, Any]:
    """The prefix cache gives slots that it had for a prompt before it was flushed; others have written them since, as
    other positions."""
    cache = engine.scheduler.tree_cache
    matched: list[Tensor] = []
    flushed: list[bool] = []

    def match(params: Any, *args: Any, **kwargs: Any) -> Any:
        found = type(cache).match_prefix(cache, params, *args, **kwargs)
        if list(params.key.token_ids[:8]) != PROMPTS[0][:8]:
            return found
        if flushed and len(params.key) < len(PROMPTS[0]):
            # Not where the prompt is put into the cache, once it is computed.
            return found._replace(device_indices=matched[-1][: len(PROMPTS[0]) - 1])
        if not flushed:
            matched.append(found.device_indices.clone())
        return found

    serve(engine, PROMPTS[:1], 2)
    cache.match_prefix = match
    serve(engine, PROMPTS[:1], 2)
    flush(engine)
    flushed.append(True)
    serve(engine, [PROMPTS[1][:7]], 2)
    serve(engine, [[(13 * i) % 200 + 3 for i in range(40)]], 2)
    victim = engine.submit(PROMPTS[0], 4)
    while not victim.output_ids:
        engine.step()
    return {"victim": victim.rid, "written": 0, "slots": matched[-1].tolist()}


HOW: dict[str, Callable[[Any], dict[str, Any]]] = {
    function.__name__: function for function in (use_after_free, handed_out_again, stale_match)
}
