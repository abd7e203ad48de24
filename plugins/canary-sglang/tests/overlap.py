"""SGLang's own event loop with the overlap scheduler, in this process: it issues a forward before it knows the results
of the one before."""

import random
from typing import Any


class _Served(Exception):
    """The traffic is at its end."""


def storm(engine: Any, seed: int, turns: int, new_tokens: int) -> dict[str, Any]:
    """Random traffic for ``turns`` turns of the loop and until all is served: requests with shared prefixes in bursts,
    some are aborted while they wait or run. ``engine``: an `engine_driver.Engine`."""
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
                engine._submit(rng.choice(prefixes)[: rng.randrange(21)] + tail, rng.randrange(1, new_tokens))
        living = [r for r in engine.requests[first:] if not r.finished() and r.rid not in engine.aborted]
        if living and rng.random() < 0.05:
            engine._abort(rng.choice(living).rid)
            aborted += 1
        idle = 0 if living or scheduler.last_batch is not None else idle + 1
        if turn >= turns and idle > 3:
            raise _Served
        return []

    # Where requests come from: a method of its own since 0.5.2x.
    whence, name = scheduler, "ingest_requests"
    if not hasattr(scheduler, name):
        whence, name = scheduler.request_receiver, "recv_requests"
    setattr(whence, name, ingest)
    try:
        scheduler.run_event_loop()
    except _Served:
        pass
    finally:
        delattr(whence, name)
    served = engine.requests[first:]
    return {
        "outputs": [list(r.output_ids) for r in served],
        "retracted": sum(int(getattr(r, "retraction_count", 0) or 0) for r in served),
        "verifies": sum(r.spec_verify_ct for r in served),
        "aborted": aborted,
    }
