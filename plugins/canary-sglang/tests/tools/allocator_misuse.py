"""An engine's own allocator, used as it mustn't be, and what it and Canary hold to be free."""

from typing import Any

import torch

from canary_core.records import POSITION, STATES, State
from tools.storms import loop
from tools.traffic import decoding, serve


def misuse(engine: Any, what: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Serves the prompts together; once all are decoding, the engine's own allocator is misused: ``double_free``,
    ``free_in_use`` of the last one's second page, or ``hand_out_held`` of it. Gives what is about it, and the
    findings of the next steps. The engine is of no use afterwards."""
    served = decoding(engine, prompts, 400)
    engine.session.canary.drain()
    from canary_sglang.compat import schedulers

    allocator = engine.runner.token_to_kv_pool_allocator
    row, _ = schedulers.table_row(engine.scheduler, served[-1])
    pages = getattr(allocator, "full_attn_allocator", allocator)
    page = int(row[pages.page_size]) // pages.page_size
    slots = torch.arange(page * pages.page_size, (page + 1) * pages.page_size, device=row.device)
    if what == "double_free":
        last = int(pages.free_pages[-1])
        slots = torch.arange(last * pages.page_size, (last + 1) * pages.page_size, device=row.device)
        pages.free(slots)
    elif what == "free_in_use":
        pages.free(slots)
    else:
        # As if the list itself had been overwritten.
        pages.free_pages[0] = page
    engine.told.violations = []
    names = [r.rid for r in served]
    for _ in range(pages.page_size + 1):
        engine.step()
    engine.session.canary.drain()
    return {
        "requests": names,
        "slots": slots.tolist(),
        "violations": [v.fields() for v in engine.told.violations],
    }


def misuse_cached(engine: Any, what: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Misuse of the engine's own prefix cache: after the prompts were served, ``free`` gives a page of a node that
    nobody holds to the allocator; while they are decoding, ``evict`` makes the cache evict a node that a request holds.
    Gives the class of the cache, and, for one that parks, the node's slots and the findings. The engine is of no use
    afterwards."""
    cache, allocator = engine.scheduler.tree_cache, engine.runner.token_to_kv_pool_allocator
    if type(cache).__name__ != "RadixCache":
        return {"cache": type(cache).__name__}
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if what == "free":
        serve(engine, prompts, 2)
    else:
        served = decoding(engine, prompts, 400)
    engine.session.canary.drain()
    engine.told.violations = []
    if what == "free":
        node = next(node for node in cache.evictable_leaves if len(node.value))
        allocator.free(node.value[: allocator.page_size].clone())
    else:
        node = next(r.last_node for r in served if not r.last_node.children)
        assert node.lock_ref > 0
        cache.evictable_leaves.add(node)
        cache.evict(EvictParams(num_tokens=cache.evictable_size() + len(node.value)))
    slots = node.value.tolist()
    engine.session.canary.drain()
    found = [v.fields() for v in engine.told.violations]
    return {"cache": "RadixCache", "slots": slots, "violations": found}


def misuse_states(engine: Any, what: str, prompts: list[list[int]]) -> dict[str, Any]:
    """As `misuse`, of the allocator of recurrent states and the last request's own."""
    served = decoding(engine, prompts, 400)
    engine.session.canary.drain()
    from canary_sglang.compat import schedulers

    allocator = engine.runner.req_to_token_pool.mamba_allocator
    slot = schedulers.state_slot(engine.scheduler, served[-1])
    if what == "double_free":
        slot = int(allocator.free_slots[-1])
    if what == "hand_out_held":
        # As if the list itself had been overwritten.
        allocator.free_slots[0] = slot
        allocator.alloc(1)
    else:
        allocator.free(torch.tensor([slot]))
    engine.told.violations = []
    for _ in range(2):
        engine.step()
    engine.session.canary.drain()
    return {
        "request": served[-1].rid,
        "slot": slot,
        "violations": [v.fields() for v in engine.told.violations],
    }


def misuse_idle(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Serves the prompts to their end, then frees a free page; gives its slots, and the findings without another
    forward. The engine is of no use afterwards."""
    serve(engine, prompts, 2)
    engine.session.canary.drain()
    pages = engine.runner.token_to_kv_pool_allocator
    slots = pages.alloc(pages.page_size).clone()
    pages.free(slots)
    pages.free(slots)
    engine.told.violations = []
    for _ in range(2):
        # Not by the scheduler, whose own check would end the process; and as if time had passed.
        engine.session.canary.step._idle_read = 0.0
        engine.session.canary.step.idle()
    return {"slots": slots.tolist(), "violations": [v.fields() for v in engine.told.violations]}


def misuse_and_fail(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Serves the prompts to their end; then, within SGLang's own event loop, frees a free page, and the loop fails
    before anything is read. Gives the page's slots, the error and the findings. The engine is of no use afterwards."""
    serve(engine, prompts, 2)
    engine.session.canary.drain()
    engine.told.violations = []
    pages = engine.runner.token_to_kv_pool_allocator
    slots = pages.alloc(pages.page_size).clone()

    def ingest(*args: Any, **kwargs: Any) -> list[Any]:
        pages.free(slots)
        pages.free(slots)
        raise RuntimeError("as an engine that finds its own books wrong")

    try:
        loop(engine.scheduler, ingest)
    except RuntimeError as error:
        raised = str(error)
    return {"slots": slots.tolist(), "error": raised, "violations": [v.fields() for v in engine.told.violations]}


def ownership(engine: Any) -> dict[str, Any]:
    """By region: how many slots of a page, and where Canary and the allocator differ about which slots are free."""
    from canary_sglang.compat import allocators

    lifetime, told = engine.session.lifetime, {}
    engine.session.canary.drain()
    for follower in lifetime._followers.values():
        pages = set(torch.cat([follower._free, *follower._released]).tolist())
        for name, page_slots in follower.regions.items():
            words = engine.session.canary.states[name].records[:, POSITION]
            free = (words & State.FREED != 0) | (words % STATES == State.UNWRITTEN)
            # Page 0 is padding; a pool may be larger than what is handed out of it.
            end = (follower._allocator.size // allocators.page_tokens(follower._allocator) + 1) * page_slots
            ours = {s for s in free.nonzero()[:, 0].tolist() if page_slots <= s < end}
            theirs = {page * page_slots + i for page in pages for i in range(page_slots)}
            told[name] = {"page_slots": page_slots, "differences": sorted(ours ^ theirs)}
    return told
