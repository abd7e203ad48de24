"""Long random traffic, the same for a seed: through the scheduler step by step, and through SGLang's own loop."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

from tools.traffic import flush


def storm(engine: Any, seed: int, steps: int, prefix: int, new_tokens: int) -> dict[str, Any]:
    """At least ``steps`` steps of random traffic, the same for a seed: requests that begin with one of a few
    prefixes come in bursts, some are aborted while they wait or run, and now and then the cache is flushed."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, 250) for _ in range(prefix)] for _ in range(4)]
    first, before = len(engine.requests), engine.steps
    counts = {"aborted": 0, "flushed": 0}
    ending = False
    idle = 0
    while True:
        queued = len(engine.scheduler.waiting_queue)
        if not ending and queued < 6 and rng.random() < 0.3:
            for _ in range(rng.randrange(1, 4)):
                hit = rng.choice(prefixes)[: rng.randrange(prefix + 1)]
                tail = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 30))]
                engine.submit(hit + tail, rng.choice((rng.randrange(1, new_tokens), new_tokens)))
        living = [r for r in engine.requests[first:][-12:] if not r.finished() and r.rid not in engine.aborted]
        if living and rng.random() < 0.03:
            engine.abort(rng.choice(living).rid)
            counts["aborted"] += 1
        ending = ending or rng.random() < 0.01 or engine.steps - before >= steps
        idle = 0 if engine.step() else idle + 1
        if idle > 50:
            raise RuntimeError(f"the engine idles, {queued} requests wait")
        if idle and ending and not engine.scheduler.waiting_queue:
            if engine.steps - before >= steps:
                break
            if not flush(engine):
                raise RuntimeError("an idle engine could not be flushed")
            counts["flushed"] += 1
            ending = False
    served = engine.requests[first:]
    return {
        "outputs": [list(r.output_ids) for r in served],
        "steps": engine.steps - before,
        "cached": sum(int(r.cached_tokens) for r in served),
        "retracted": sum(int(getattr(r, "retraction_count", 0) or 0) for r in served),
        **counts,
    }


def storm_overlapped(engine: Any, seed: int, turns: int, new_tokens: int) -> dict[str, Any]:
    """Random traffic through SGLang's own event loop with the overlap scheduler, which issues a forward before it knows
    the results of the one before: for ``turns`` turns of the loop and until all is served, requests with shared
    prefixes come in bursts, some are aborted while they wait or run."""
    scheduler, rng = engine.scheduler, random.Random(seed)
    prefixes = [[rng.randrange(3, 250) for _ in range(20)] for _ in range(4)]
    first = len(engine.requests)
    turn = idle = aborted = 0

    def ingest(*args: Any, **kwargs: Any) -> list[Any]:
        nonlocal turn, idle, aborted
        turn += 1
        if turn < turns and len(scheduler.waiting_queue) < 6 and rng.random() < 0.3:
            for _ in range(rng.randrange(1, 4)):
                tail = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 30))]
                engine.submit(rng.choice(prefixes)[: rng.randrange(21)] + tail, rng.randrange(1, new_tokens))
        living = [r for r in engine.requests[first:] if not r.finished() and r.rid not in engine.aborted]
        if living and rng.random() < 0.05:
            engine.abort(rng.choice(living).rid)
            aborted += 1
        idle = 0 if living or scheduler.last_batch is not None else idle + 1
        if turn >= turns and idle > 3:
            raise Served
        return []

    with contextlib.suppress(Served):
        loop(scheduler, ingest)
    served = engine.requests[first:]
    return {
        "outputs": [list(r.output_ids) for r in served],
        "retracted": sum(int(getattr(r, "retraction_count", 0) or 0) for r in served),
        "verifies": sum(r.spec_verify_ct for r in served),
        "aborted": aborted,
    }


def loop(scheduler: Any, ingest: Callable[..., list[Any]]) -> None:
    """SGLang's own event loop with requests from ``ingest``, which ends it with an exception."""
    # Where requests come from: a method of its own since 0.5.2x.
    whence, name = type(scheduler), "ingest_requests"
    if not hasattr(scheduler, name):
        whence, name = type(scheduler.request_receiver), "recv_requests"
    usual = getattr(whence, name)
    setattr(whence, name, ingest)
    try:
        scheduler.run_event_loop()
    finally:
        setattr(whence, name, usual)


class Served(Exception):
    """The traffic is at its end."""
