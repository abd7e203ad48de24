"""What SGLang does to the slot of padded rows, slot 0."""

import math
from typing import Any

from tools.inspection import findings
from tools.traffic import decoding

NULL = 0


def pad_with_nan(engine: Any, prompts: list[list[int]], layer: int, half: str) -> dict[str, Any]:
    """Serves the prompts. Once all decode, each store of a layer does what it does for a batch with a padded row whose
    K or V is NaN; gives what was found, and in how many forwards that was so."""
    served = decoding(engine, prompts, 12)
    pool, padded = engine.runner.token_to_kv_pool, [0]
    row = getattr(pool, f"{half}_buffer")[layer][NULL]

    def store(where: Any, *args: Any, **kwargs: Any) -> None:
        type(pool).set_kv_buffer(pool, where, *args, **kwargs)
        if where.layer_id == layer:
            padded[0] += 1
            row.fill_(math.nan)

    pool.set_kv_buffer = store
    try:
        while not all(request.finished() for request in served):
            engine.step()
    finally:
        del pool.set_kv_buffer
    row.zero_()
    return {"violations": findings(engine)["violations"], "padded": padded[0]}


def store_in_null_slot(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Serves the prompts together; in one decode the last one's token is stored in the slot of padding. Gives what was
    found, whose token it was and at which position."""
    served = decoding(engine, prompts, 8)
    victim, scheduler = served[-1], engine.scheduler
    about: dict[str, Any] = {}

    def run(batch: Any) -> Any:
        if batch.forward_mode.is_decode() and victim in batch.reqs:
            del scheduler.run_batch
            row = batch.reqs.index(victim)
            batch.out_cache_loc = batch.out_cache_loc.clone()
            about.update(slot=int(batch.out_cache_loc[row]), position=int(batch.seq_lens[row]) - 1)
            batch.out_cache_loc[row] = NULL
        return type(scheduler).run_batch(scheduler, batch)

    scheduler.run_batch = run
    while not all(request.finished() for request in served):
        engine.step()
    return {"violations": findings(engine)["violations"], "request": victim.rid, **about}
