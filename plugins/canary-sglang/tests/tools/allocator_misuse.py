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
    """Misuse of the engine's own prefix cache, a `RadixCache` or a `UnifiedRadixCache`: after the prompts were served,
    ``free`` gives a page of a node that nobody holds to the allocator, and ``hand_out`` has the allocator's list name
    it; while they are decoding, ``evict`` makes the cache evict a node that a request holds. Gives the node's slots and
    the findings. The engine is of no use afterwards."""
    cache, allocator = engine.scheduler.tree_cache, engine.runner.token_to_kv_pool_allocator
    if what == "evict":
        served = decoding(engine, prompts, 400)
    else:
        serve(engine, prompts, 2)
    engine.session.canary.drain()
    engine.told.violations = []
    if what == "evict":
        evict = _evict_held if type(cache).__name__ == "RadixCache" else _evict_held_by_core
        slots = evict(cache, served)
    else:
        slots = _unlocked(cache)[: allocator.page_size].clone()
        if what == "free":
            allocator.free(slots)
        else:
            # As if the list itself had been overwritten.
            allocator.free_pages[0] = int(slots[0]) // allocator.page_size
            allocator.alloc(allocator.page_size)
    engine.session.canary.drain()
    found = [v.fields() for v in engine.told.violations]
    return {"slots": slots.tolist(), "violations": found}


def _evict_held(cache: Any, served: list[Any]) -> torch.Tensor:
    """A `RadixCache` has a node of the last request among those that may go."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    node = next(r.last_node for r in served if not r.last_node.children)
    assert node.lock_ref > 0
    cache.evictable_leaves.add(node)
    cache.evict(EvictParams(num_tokens=cache.evictable_size() + len(node.value)))
    slots: torch.Tensor = node.value
    return slots


def _evict_held_by_core(cache: Any, served: list[Any]) -> torch.Tensor:
    """The core of a `UnifiedRadixCache` says of the last request's slots that they are to be freed."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    core = cache.tree_core
    (full,) = cache.tree_components
    held = getattr(served[-1], "last_node", None)
    held = served[-1].kv.lock.node if held is None else held
    slots: torch.Tensor = core.get_component_device_value(held, full).clone()
    advance = core.evict_device_next_node

    def wrong(*args: Any) -> Any:
        del core.evict_device_next_node
        step = advance(*args)
        step.device_frees[full].append(slots)
        return step

    core.evict_device_next_node = wrong
    cache.evict(EvictParams(num_tokens=1))
    return slots


def _unlocked(cache: Any) -> torch.Tensor:
    """Slots of all nodes that nobody has locked, by the cache itself."""
    slots: torch.Tensor
    if type(cache).__name__ == "RadixCache":
        parts, todo = [torch.empty(0, dtype=torch.int64)], list(cache.root_node.children.values())
        while todo:
            node = todo.pop()
            parts += [node.value] if node.lock_ref == 0 else []
            todo += node.children.values()
        return torch.cat(parts)
    slots = cache.tree_core.walk_for_kv_canary(unlocked_only=True, swa_resident_only=False).slot_indices
    return slots


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
        engine.session.canary.step._reads_at._last_idle = 0.0
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


def parked(engine: Any) -> dict[str, Any]:
    """Which slots of the full pool are parked by Canary and not by the locks of the cache, or the other way round, and
    how many are by both; what was told of why they are not."""
    engine.session.canary.drain()
    words = engine.session.canary.states["full"].records[:, POSITION]
    ours = set(((words & State.PARKED != 0) & (words & State.FREED == 0)).nonzero()[:, 0].tolist())
    theirs = set(_unlocked(engine.scheduler.tree_cache).tolist())
    told = [event.fields for event in engine.told.events if event.name == "parking_off"]
    return {"both": len(ours & theirs), "differences": sorted(ours ^ theirs), "off": told}
