"""Random traffic while bits flip anywhere in KV that is in use or parked, and what is answered."""

import contextlib
import random
from collections import Counter
from typing import Any

import torch

from tools.parked_flips import BITS, flip_state
from tools.storms import Served, loop
from tools.traffic import flush, lost_slots


def storm_of_flips(engine: Any, seed: int, count: int, rate: float, at_least: int = 1, **more: Any) -> dict[str, Any]:
    """Through SGLang's own event loop: ``count`` requests with shared prefixes, some longer than a chunk, come in
    bursts; between two turns a bit flips with probability ``rate``. Each answer is compared with that of the same
    engine without a flip. ``at_least``: so many tokens are asked for. ``more``: fields of SGLang's message."""
    scheduler, rng = engine.scheduler, random.Random(f"flips {seed}")
    prefixes = [[rng.randrange(3, 250) for _ in range(50)] for _ in range(3)]
    prompts = [
        rng.choice(prefixes)[: rng.randrange(51)] + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 40))]
        for _ in range(count)
    ]
    lengths = [rng.randrange(at_least, 16) for _ in prompts]
    events, flips = len(engine.told.events), 0

    def serve(flipping: bool) -> list[Any]:
        nonlocal flips
        first = len(engine.requests)
        idle = turns = 0

        def ingest(*args: Any, **kwargs: Any) -> list[Any]:
            nonlocal idle, flips, turns
            turns += 1
            served = engine.requests[first:]
            for _ in range(rng.randrange(1, 4)):
                done = len(engine.requests) - first
                if done < count and len(scheduler.waiting_queue) < 4 and rng.random() < 0.4:
                    engine.submit(prompts[done], lengths[done], **more)
            if flipping and rng.random() < rate:
                flips += _flip_any(engine, rng)
            living = len(served) < count or not all(r.finished() for r in served)
            idle = 0 if scheduler.last_batch is not None else idle + 1
            if not living and idle > 2:
                raise Served
            if turns > 100 * count + 1000:
                raise RuntimeError("requests never end")
            return []

        with contextlib.suppress(Served):
            loop(scheduler, ingest)
        return engine.requests[first:]

    clean = serve(flipping=False)
    flush(engine)
    served = serve(flipping=True)
    # A flush would give all of them back.
    lost = lost_slots(scheduler)
    emptied = flush(engine)
    told: Counter[str] = Counter()
    for request, right in zip(served, clean, strict=True):
        # Speculation may compute more tokens than were asked for; nobody is given these.
        answer, due = (list(r.output_ids)[: r.sampling_params.max_new_tokens] for r in (request, right))
        ended = request.finished_reason.to_json()["type"]
        told["error" if ended == "abort" else "right" if answer == due else "wrong"] += 1
        if ended != "abort" and more.get("return_logprob"):
            told["wrong_logprobs"] += not _same_logprobs(request, right)
    told.update(event.name for event in engine.told.events[events:])
    names = ("right", "wrong", "error", "wrong_logprobs", "recomputed", "aborted", "quarantined", "quarantine_failed")
    return {
        "flips": flips,
        **{name: told[name] for name in (*names, "disabled", "reporting_failed")},
        "emptied": emptied,
        "lost": lost,
    }


def _flip_any(engine: Any, rng: random.Random) -> bool:
    """Flips a bit of a slot in use, by SGLang's own list of free ones; False where all are free. Of a model with
    recurrent states every second time one of a state."""
    allocator, pool = engine.scheduler.token_to_kv_pool_allocator, engine.runner.token_to_kv_pool
    states = getattr(engine.scheduler.req_to_token_pool, "mamba_allocator", None)
    if states is not None:
        pool = pool.full_kv_pool
        if rng.random() < 0.5:
            unused = set(states.free_slots.tolist())
            used = [slot for slot in range(1, int(states.size) + 1) if slot not in unused]
            for slot in used and [rng.choice(used)]:
                flip_state(engine.runner.req_to_token_pool.mamba_pool, slot, rng)
            return bool(used)
    free = {int(s) for part in (allocator.free_pages, allocator.release_pages) for s in part}
    used = [slot for slot in range(1, int(engine.scheduler.max_total_num_tokens) + 1) if slot not in free]
    if not used:
        return False
    words = rng.choice((pool.k_buffer, pool.v_buffer))[rng.randrange(pool.layer_num)][rng.choice(used)]
    words = words.view(torch.int32)
    words[tuple(rng.randrange(size) for size in words.shape)] ^= 1 << rng.choice(BITS)
    return True


def _same_logprobs(request: Any, right: Any) -> bool:
    def of(r: Any) -> torch.Tensor:
        kept = getattr(r, "logprob", r)
        # The first token of a prompt has none.
        return torch.tensor([*kept.input_token_logprobs_val[1:], *kept.output_token_logprobs_val])

    mine, due = of(request), of(right)
    return len(due) > len(right.output_ids) and mine.shape == due.shape and torch.allclose(mine, due, atol=1e-3)
