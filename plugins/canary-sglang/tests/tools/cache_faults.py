"""Corruptions of a real SGLang prefix cache, made by hand where the cache keeps its nodes, and taken back again."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from canary_core.guard.reporting.known import Known
from canary_core.records import POSITION, TOKEN, UNPARKED, State
from canary_core.region import RegionKind
from tools import builtin_canary

SWA_CACHE = "swa_radix_cache_of_tests"


def use_swa_radix_cache(options: dict[str, Any]) -> None:
    """Makes ``radix_cache_backend`` `SWA_CACHE` known, where the options ask for it: releases to 0.5.20 still have
    `SWARadixCache`, and use it for nothing by themselves."""
    if options.get("radix_cache_backend") != SWA_CACHE:
        return
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

    register_radix_cache_backend(SWA_CACHE, lambda context: SWARadixCache(params=context.params))


def sweep(engine: Any) -> dict[str, Any]:
    """Idles until one more sweep, begun now, is done; its event's fields."""
    builtin_canary.sweep()
    sweeper = engine.session.sweep
    told = _sweeps(engine)
    sweeper._abandon()
    sweeper._due = 0
    sweeper._scheduler = engine.scheduler
    for _ in range(1000):
        # Not through the scheduler, whose own checks end the process where the cache and the allocator disagree.
        sweeper.idle()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if len(_sweeps(engine)) > len(told):
            return dict(_sweeps(engine)[len(told)].fields)
    raise RuntimeError("the sweep does not end")


def break_cache(engine: Any, how: str, which: str = "any") -> dict[str, Any]:
    """Corrupts the prefix cache, sweeps, repairs it again; gives what was found. ``how``: a function below. ``which``:
    any node of two tokens or more, one that a request holds (``locked``), one whose window has passed (``passed``), or
    one that is in host memory only (``host_runs``)."""
    if which == "locked":
        engine.submit(list(max((r.origin_input_ids for r in engine.requests), key=len)), 30)
        for _ in range(4):
            engine.step()
    if which == "passed":
        _evict_windows(engine)
    if which == "host_runs":
        _evict(engine, 100)
    node = _choose(engine, which)
    engine.session.canary.drain()
    # The same node may have been broken in the same way before, which would be no news.
    engine.session.canary._findings.known = Known()
    engine.told.violations = []
    about, undo = HOW[how](engine, node)
    report = sweep(engine)
    found, engine.told.violations = engine.told.violations, []
    undo()
    while which == "locked" and engine.step():
        pass
    return {"node": node.id, **about, "sweep": report, "violations": [v.fields() for v in found]}


def swap(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """Two tokens of the node change slots."""
    value = _value(engine, node)
    slots = value[:2].tolist()
    value[:2] = value[[1, 0]]

    def undo() -> None:
        value[:2] = value[[1, 0]]

    return {"slots": slots}, undo


def token(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """A slot of the node was written for another token, as far as anybody remembers."""
    slot = int(_value(engine, node)[-1])
    changed = []
    for name, state in engine.session.canary.states.items():
        if state.region.kind is RegionKind.RING:
            continue
        own = slot // state.region.tokens_per_slot
        if state.region.slot_map is not None:
            own = int(state.region.slot_map[own])
        written = int(state.records[own, POSITION]) & UNPARKED == State.WRITTEN
        if own and written and (state.region.tokens_per_slot == 1 or (slot + 1) % state.region.tokens_per_slot == 0):
            changed.append((name, own))
            state.records[own, TOKEN] += 1

    def undo() -> None:
        for name, own in changed:
            engine.session.canary.states[name].records[own, TOKEN] -= 1

    return {"slots": [slot], "changed": changed}, undo


def free(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """The allocator got the node's slots back, unseen by what follows its calls, and the cache still has them."""
    allocator = _allocator(engine)
    before = {name: value for name, value in vars(allocator).items() if name.endswith("_pages")}
    value = _value(engine, node)
    followers = engine.session.lifetime._followers
    followed = dict(followers)
    followers.clear()
    allocator.free(value.clone())
    followers.update(followed)

    def undo() -> None:
        vars(allocator).update(before)

    return {"slots": value.tolist()}, undo


def lock(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """One release too many."""
    where, name = _lock(engine, node)
    before = getattr(where, name)
    setattr(where, name, -1)
    return {}, lambda: setattr(where, name, before)


def key(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """Its parent has the node under another token."""
    children = node.parent.children
    own = next(name for name, child in children.items() if child is node)
    children["other"] = children.pop(own)

    def undo() -> None:
        children[own] = children.pop("other")

    return {}, undo


def parent(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """The node believes to be somebody else's child."""
    own, node.parent = node.parent, node
    return {}, lambda: setattr(node, "parent", own)


def twice(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """A slot of another node takes the place of one of this."""
    other = next(n for n in _nodes(engine) if n is not node and _value(engine, n) is not None)
    value = _value(engine, node)
    before = int(value[0])
    value[0] = _value(engine, other)[0]
    return {"slots": [int(value[0])], "other": other.id}, lambda: value.__setitem__(0, before)


def sizes(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """The cache counts one token more than it has."""
    _count(engine, 1)
    return {}, lambda: _count(engine, -1)


def unmap(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """A node in the window loses its slots there."""
    slot_map = engine.session.canary.regions["swa"].slot_map
    slot = int(_value(engine, node)[0])
    before = int(slot_map[slot])
    slot_map[slot] = 0
    return {"slots": [slot]}, lambda: slot_map.__setitem__(slot, before)


def remap(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """A node whose window has passed still has a slot there."""
    slot_map = engine.session.canary.regions["swa"].slot_map
    slot = int(_value(engine, node)[0])
    before = int(slot_map[slot])
    slot_map[slot] = 3
    return {"slots": [3]}, lambda: slot_map.__setitem__(slot, before)


def host_swap(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """Two tokens of the node change host slots."""
    host = _host(node)
    host[:2] = host[[1, 0]]

    def undo() -> None:
        host[:2] = host[[1, 0]]

    return {}, undo


def host_free(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """The host pool could hand out one of the node's host slots."""
    used = engine.session._parked().host_pool.slot_used
    slot = int(_host(node)[0])
    used[slot] = False
    return {}, lambda: used.__setitem__(slot, True)


def dead(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """A node that is nowhere."""
    where = _holder(node)
    before, where.host_value = where.host_value, None
    return {}, lambda: setattr(where, "host_value", before)


def queued(engine: Any, node: Any) -> tuple[dict[str, Any], Callable[[], None]]:
    """No fault: the node was given slots to be loaded to, and nothing is loaded before the next prefill."""
    controller, where = engine.scheduler.tree_cache.cache_controller, _holder(node)
    slots = controller.load(host_indices=where.host_value, node_id=node.id)
    where.value = slots.clone()
    _count(engine, len(slots))

    def undo() -> None:
        where.value = None
        _count(engine, -len(slots))
        controller.load_queue.pop()
        controller.mem_pool_device_allocator.free(slots)

    return {"slots": slots.tolist()}, undo


HOW: dict[str, Callable[[Any, Any], tuple[dict[str, Any], Callable[[], None]]]] = {
    f.__name__: f
    for f in (swap, token, free, lock, key, parent, twice, sizes, unmap, remap, host_swap, host_free, dead, queued)
}


class RustNode:
    """A node of the core in Rust, which can only be asked for by its number."""

    def __init__(self, id: int) -> None:
        self.id = id


def _sweeps(engine: Any) -> list[Any]:
    return [event for event in engine.told.events if event.name == "sweep"]


def _tree(engine: Any) -> Any:
    cache = engine.scheduler.tree_cache
    return getattr(cache, "tree_core", cache)


def _allocator(engine: Any) -> Any:
    allocator = engine.scheduler.token_to_kv_pool_allocator
    return getattr(allocator, "full_attn_allocator", allocator)


def _nodes(engine: Any) -> Iterator[Any]:
    stack = [_tree(engine).root_node]
    while stack:
        node = stack.pop()
        if node.parent is not None:
            yield node
        stack += node.children.values()


def _choose(engine: Any, which: str) -> Any:
    if type(_tree(engine)).__name__ == "RustUnifiedTreeCore":
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        keys = [RadixKey(request.origin_input_ids) for request in reversed(engine.requests)]
        hits = (_tree(engine).match_prefix(MatchPrefixParams(key=key)) for key in keys)
        return RustNode(next(hit.last_device_node for hit in hits if len(hit.device_indices) > 1))
    wanted = {
        "any": lambda node: not _passed(engine, node),
        "locked": lambda node: getattr(*_lock(engine, node)) > 0,
        "passed": lambda node: _passed(engine, node),
        "host_runs": lambda node: _value(engine, node) is None,
    }[which]
    nodes = (n for n in _nodes(engine) if (_value(engine, n) is None) == (which == "host_runs"))
    return next(n for n in nodes if wanted(n) and len(n.key) > 1)


def _evict_windows(engine: Any) -> None:
    """Has the cache give up slots of the window until an inner node is left without."""
    for _ in range(100):
        if any(_passed(engine, node) and len(node.key) > 1 for node in _nodes(engine)):
            return
        _evict(engine, 0, 4)
    raise RuntimeError("no window is ever given up")


def _evict(engine: Any, tokens: int, window_tokens: int = 0) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    engine.scheduler.tree_cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=window_tokens))


def _count(engine: Any, more: int) -> None:
    """The cache counts so many more evictable tokens."""
    tree = _tree(engine)
    counts = getattr(tree, "component_evictable_size_", None)
    if counts is None:
        counts = vars(tree)
    name = next(name for name in counts if not isinstance(name, str) or name.endswith("evictable_size_"))
    counts[name] += more


def _value(engine: Any, node: Any) -> Any:
    if isinstance(node, RustNode):
        return _tree(engine)._binding.get_component_device_value(node.id, 0)
    return node.component_data[0].value if hasattr(node, "component_data") else node.value


def _holder(node: Any) -> Any:
    """What has the node's slots."""
    return node.component_data[0] if hasattr(node, "component_data") else node


def _host(node: Any) -> Any:
    return _holder(node).host_value


def _lock(engine: Any, node: Any) -> tuple[Any, str]:
    if hasattr(node, "component_data"):
        return node.component_data[0], "lock_ref"
    return node, "full_lock_ref" if hasattr(node, "full_lock_ref") else "lock_ref"


def _passed(engine: Any, node: Any) -> bool:
    if "swa" not in engine.session.canary.regions:
        return False
    if hasattr(node, "component_data"):
        kinds = {kind.name: kind for kind in _tree(engine).component_types}
        return node.component_data[kinds["SWA"]].value is None
    return bool(node.swa_tombstone)
