"""Prefix caches: slots, and eviction. `prefix_cache/tree.py` has the nodes, `cache_locks.py` the locks."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from canary_sglang.compat.runners import disaggregation, host_cache


def keeps_host_copies(scheduler: Any) -> bool:
    """Whether KV evicted from the device may come back from host memory."""
    args = scheduler.server_args
    return any(getattr(args, name, False) for name in ("enable_hierarchical_cache", "enable_lmcache"))


TIERED = ("UnifiedRadixCache", "HiRadixCache")
"""Prefix caches with copies of nodes in host memory."""


def giving_up_refusal(scheduler: Any, judged: Sequence[str] = ()) -> str | None:
    """Why KV evicted from the device may come back from elsewhere, None if evicted for good. Copies in host memory
    go as well, see `evict_nodes`. ``judged``: storage back ends, by class, from which nothing comes back uncompared."""
    args, cache = scheduler.server_args, scheduler.tree_cache
    if not keeps_host_copies(scheduler):
        return None
    if getattr(args, "enable_lmcache", False) or _stores_unjudged(cache, judged):
        return "copies in LMCache or in a storage back end may come back"
    known = all(hasattr(cache, name) for name in ("evict_host", "loading_check", "writing_check"))
    if not known or type(cache).__name__ not in TIERED or not _keeps_copies_of_nodes(cache):
        return "copies in host memory may come back"
    return None


def _stores_unjudged(cache: Any, judged: Sequence[str]) -> bool:
    """Whether the cache has a storage back end that is not among the ``judged``, or stores there for other ranks."""
    controller = getattr(cache, "cache_controller", None)
    backend = getattr(controller, "storage_backend", None)
    if backend is None:
        return False
    return type(backend).__name__ not in judged or bool(getattr(controller, "backup_skip", False))


def _keeps_copies_of_nodes(cache: Any) -> bool:
    """Whether the cache has the copies in host memory node by node."""
    linked = getattr(cache, "linker", None) is not None
    return getattr(cache, "host_memory_mode", "cache") == "cache" and not linked


def parking_refusal(runner: Any) -> str | None:
    """Why slots without a request are unknown for every cache, None if known for some: see `cache_locks.locks_of`."""
    args = runner.server_args
    if disaggregation(runner) != "null" or host_cache(runner):
        return "requests of other engines, and copies to host memory, hold slots without a lock"
    if getattr(args, "speculative_algorithm", None) or getattr(args, "enable_streaming_session", False):
        return "speculative decoding and streaming sessions hold slots beside the cache"
    return None


def lookup_refusal(cache: Any) -> str | None:
    """Why slots of a prefix can't be looked up without a change to the cache, None if possible."""
    if getattr(cache, "disable", False):
        return "the engine has no prefix cache"
    if type(cache).__name__ != "UnifiedRadixCache":
        return f"{type(cache).__name__} is no prefix cache that is looked into without a change to what it evicts first"
    core = cache.tree_core
    if getattr(cache, "linker", None) is not None:
        return "the prefix cache has a tier of its own"
    needed = ("match_full_device_prefix", "collect_full_device_indices", "root_node_handle")
    return missing_in(core, needed)


def missing_in(core: Any, needed: Sequence[str]) -> str | None:
    """Why the core of a `UnifiedRadixCache` can't be used, None for one with all ``needed`` attributes."""
    missing = [name for name in needed if not hasattr(core, name)]
    return f"the UnifiedRadixCache of this release has no {', '.join(missing)}" if missing else None


def free_tokens(cache: Any, allocator: Any) -> int:
    """Tokens of a new request that fit in free slots, and in those that the prefix cache gives up, in each pool."""
    if not cache.supports_swa():
        return int(allocator.available_size() + cache.evictable_size())
    full = allocator.full_available_size() + cache.full_evictable_size()
    return int(min(full, allocator.swa_available_size() + cache.swa_evictable_size()))


def states_fit(cache: Any, evicts: bool) -> bool:
    """Whether a new request finds as many free recurrent states as SGLang provides for, of a model that has some;
    ``evicts``: or gets them from the prefix cache."""
    allocator = getattr(getattr(cache, "req_to_token_pool", None), "mamba_allocator", None)
    if allocator is None:
        return True
    keeps = cache.supports_mamba()
    tracking = getattr(cache.req_to_token_pool, "mamba_initial_tracking_slots", None)
    if tracking is None:
        from sglang.srt.mem_cache import common

        needed = int(common.MAMBA_STATE_PER_REQ_PREFIX_CACHE if keeps else common.MAMBA_STATE_PER_REQ_NO_CACHE)
    else:
        needed = 1 + int(tracking)
    free = int(allocator.schedulable_available_size())
    return free + (int(cache.mamba_evictable_size()) if keeps and evicts else 0) >= needed


def publishes(cache: Any) -> str:
    """Name of the function by which the cache takes the KV of a request, up to ``up_to`` tokens: of an ended one only
    up to 0.5.21, later of any."""
    return "checkpoint" if hasattr(cache, "checkpoint") else "insert_req"


def looked_ahead(cache: Any) -> int:
    """Number of tokens behind a prefix that belong to the prefix's key: EAGLE's cache has a slot under the slot's token
    and the next one."""
    return int(cache.tree_core.is_eagle)


def matched(cache: Any, tokens: Any, extra_key: str | None, cache_salt: str | None) -> tuple[int, Any]:
    """Number of ``tokens``, int64 array, from the first on, in whole pages of the cache on the device, and their lowest
    node, without the tokens `looked_ahead` at. For a cache without a `lookup_refusal`; changes nothing there,
    neither locks nor times."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(tokens, extra_key, cache_salt=cache_salt)
    length, node, _ = cache.tree_core.match_full_device_prefix(key)
    return int(length), node


def matched_slots(cache: Any, tokens: Any, extra_key: str | None, cache_salt: str | None) -> torch.Tensor:
    """Slots of the full pool for the tokens counted by `matched`, int64 on the pool's device."""
    length, node = matched(cache, tokens, extra_key, cache_salt)
    root = cache.root_node_handle()
    # The lowest node may have more tokens than match.
    slots: torch.Tensor = cache.tree_core.collect_full_device_indices(node, root)[:length]
    return slots


def matched_state(cache: Any, tokens: Any, extra_key: str | None, cache_salt: str | None) -> torch.Tensor:
    """The slot of the recurrent states behind the tokens counted by `matched`, int64 ``[1]``; empty where the cache
    keeps none just there, or none at all."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    core, state = cache.tree_core, None
    if cache.supports_mamba():
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        key = RadixKey(tokens, extra_key, cache_salt=cache_salt)
        length, node, whole = core.match_full_device_prefix(key)
        # A node's states are those behind its last token.
        state = core.get_component_device_value(node, ComponentType.MAMBA) if 0 < length == whole else None
    return torch.empty(0, dtype=torch.int64) if state is None else state


def oldest_leaf(cache: Any) -> tuple[Any, int]:
    """The node that the cache evicts next, as of `matched`, and its number of tokens; None and 0 for no such node, and
    in a cache whose nodes have windows, states or copies on the host. For a cache without a `lookup_refusal`; changes
    nothing."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    core, kind = cache.tree_core, ComponentType.FULL
    needed = ("evict_device_start", "evict_device_next_node", "evict_device_end")
    more = cache.supports_swa() or cache.supports_mamba() or getattr(core, "enable_hicache", False)
    if more or missing_in(core, needed) is not None:
        return None, 0
    core.evict_device_start(kind, 1)
    try:
        node = core.evict_device_next_node(kind, {kind: 0}).node_id
    finally:
        core.evict_device_end(kind)
    return node, 0 if node is None else _key_length(core, node)


def evict_oldest_leaf(cache: Any) -> int:
    """Evicts the `oldest_leaf`; returns the number of tokens."""
    return _evict(cache, 1)


def evicted(result: Any) -> int:
    """Number of tokens given up by a cache's ``evict``, from its result."""
    return int(result.num_tokens_evicted)


def cached_slots(cache: Any) -> torch.Tensor | None:
    """Slots of the full pool for all tokens in the prefix cache; None if the cache is empty."""
    size = cache.total_size() if hasattr(cache, "all_values_flatten") else 0
    if not (size[0] if isinstance(size, tuple) else size):
        return None
    if type(cache).__name__ == "HiRadixCache":
        # Its own function fails where nodes are in host memory only.
        nodes = list(cache.root_node.children.values())
        for node in nodes:
            nodes += node.children.values()
        values = [node.value for node in nodes if node.value is not None]
        return torch.cat(values) if values else None
    slots: torch.Tensor = cache.all_values_flatten()
    return slots


def cached_states(cache: Any) -> torch.Tensor | None:
    """Slots of all recurrent states in the prefix cache; None for a cache without states."""
    if not cache.supports_mamba():
        return None
    slots: torch.Tensor = cache.all_mamba_values_flatten()
    return slots


def evict_states(cache: Any, states: Collection[int]) -> int:
    """Evicts each node with one of the recurrent ``states``, and all nodes below, unless in use; returns the number of
    tokens. From a cache without a choice, evicts every node not in use."""
    tokens = int(cache.evictable_size())
    if not names_nodes(cache):
        return _evict(cache, tokens)
    with _only_chosen_leaves(cache, StatesAbove(cache, states)):
        return _evict(cache, tokens)


def names_nodes(cache: Any) -> bool:
    """Whether each node's recurrent state and parent can be told, and leaves to evict chosen."""
    core = getattr(cache, "tree_core", None)
    needed = ("get_component_device_value", "is_root", "validate_buffer_backup")
    return _names_leaves(cache) and all(hasattr(core, name) for name in needed)


class StatesAbove:
    """Of a cache that `names_nodes`: whether one of ``states`` belongs to a node, given by its number, or to one above.
    For a tree that doesn't change."""

    def __init__(self, cache: Any, states: Collection[int]) -> None:
        self._core = cache.tree_core
        self._kind = next(kind for kind in cache.tree_components if kind.name == "MAMBA")
        self._states = states
        self._known: dict[int, bool] = {}

    def __call__(self, node: int) -> bool:
        """See the class. Reads the device."""
        path = []
        while node not in self._known and not self._core.is_root(node):
            path.append(node)
            above = _parent(self._core, node)
            if above is None:
                # Nobody knows what is above.
                self._known[node] = True
                break
            node = above
        found = self._known.get(node, False)
        for below in reversed(path):
            found = found or self._has(below)
            self._known[below] = found
        return found

    def _has(self, node: int) -> bool:
        state = self._core.get_component_device_value(node, self._kind)
        return state is not None and not set(state.tolist()).isdisjoint(self._states)


def _parent(core: Any, node: int) -> int | None:
    """The number of a node's parent; None where the core does not tell."""
    found = core.validate_buffer_backup(node, _key_length(core, node))
    return None if found is None else int(found.parent_node_id)


def _key_length(core: Any, node: int) -> int:
    """Number of a node's own tokens."""
    if hasattr(core, "_binding"):
        (length,) = core._binding.get_node_key_lengths([node])
        return int(length)
    return len(core.node_by_id(node).key)


ALL_TOKENS = 1 << 40

SlotTest = Callable[[torch.Tensor], torch.Tensor]
"""Whether each of the given slots of the full pool must be evicted: bool ``[n]``."""


def evict_nodes(cache: Any, must_go: SlotTest) -> int:
    """Evicts each node with a slot that ``must_go``, and all nodes below, unless in use; returns the number of tokens.
    From a cache without a choice, evicts every node not in use. With HiCache the copies in host memory go, too, and
    all other nodes that are not on the device: no choice is offered there."""
    if getattr(cache, "cache_controller", None) is None:
        return _evict_from_device(cache, must_go)
    # A copy under way holds its node.
    cache.writing_check()
    cache.loading_check()
    evicted = _evict_from_device(cache, must_go)
    cache.evict_host(ALL_TOKENS)
    return evicted


def _evict_from_device(cache: Any, must_go: SlotTest) -> int:
    if type(cache).__name__ in ("RadixCache", "HiRadixCache"):
        return _evict_from_radix(cache, must_go)
    full = cache.full_evictable_size() if cache.supports_swa() else cache.evictable_size()
    window = cache.swa_evictable_size() if cache.supports_swa() else 0
    if _names_leaves(cache):
        with _only_chosen_leaves(cache, partial(_has_slot_above, cache, must_go)):
            return _evict(cache, full)
    return _evict(cache, full, window)


def _evict(cache: Any, tokens: int, window_tokens: int = 0) -> int:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if not tokens and not window_tokens:
        return 0
    return int(cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=window_tokens)).num_tokens_evicted)


def _names_leaves(cache: Any) -> bool:
    """Whether a function of the cache's core, in Python or Rust, names the leaves to evict, one after another."""
    core = getattr(cache, "tree_core", None)
    return type(cache).__name__ == "UnifiedRadixCache" and all(
        hasattr(owner, name)
        for owner, name in (
            (core, "evict_device_next_node"),
            (core, "collect_full_device_indices"),
            (cache, "root_node_handle"),
        )
    )


def _has_slot_above(cache: Any, must_go: SlotTest, node: Any) -> bool:
    """Whether a slot that ``must_go`` is on the path from the root to ``node``."""
    slots = cache.tree_core.collect_full_device_indices(node, cache.root_node_handle())
    return bool(must_go(slots).any())


@contextmanager
def _only_chosen_leaves(cache: Any, chosen: Callable[[Any], bool]) -> Iterator[None]:
    """Context: the core of a `UnifiedRadixCache` names only ``chosen`` leaves to evict, and nodes that become such
    leaves."""
    core = cache.tree_core
    advance = core.evict_device_next_node

    def next_chosen(*args: Any, **kwargs: Any) -> Any:
        while True:
            step = advance(*args, **kwargs)
            # The cache itself must handle what the core has freed in this step.
            if step.node_id is None or step.device_frees or step.host_frees:
                return step
            if chosen(step.node_id):
                return step

    core.evict_device_next_node = next_chosen
    try:
        yield
    finally:
        del core.evict_device_next_node


def _evict_from_radix(cache: Any, must_go: SlotTest) -> int:
    order = _ChosenFirst(cache.root_node, must_go)
    if not order.tokens:
        return 0
    usual = cache.eviction_strategy
    cache.eviction_strategy = order
    try:
        return _evict(cache, order.tokens)
    finally:
        cache.eviction_strategy = usual


class _ChosenFirst:
    """An eviction strategy for `RadixCache` and `HiRadixCache` with chosen nodes first: those with a slot that
    ``must_go`` on their path from the root. ``tokens``: number of the chosen nodes' tokens on the device and not in
    use."""

    def __init__(self, root: Any, must_go: SlotTest) -> None:
        self._nodes: set[int] = set()
        self.tokens = 0
        todo = [(node, False) for node in root.children.values()]
        while todo:
            node, chosen = todo.pop()
            here = node.value is not None
            chosen = chosen or (here and bool(must_go(node.value).any()))
            if chosen and here and node.lock_ref == 0:
                self._nodes.add(node.id)
                self.tokens += len(node.value)
            todo += [(child, chosen) for child in node.children.values()]

    def get_priority(self, node: Any) -> int:
        """0 for chosen nodes, 1 for others; `RadixCache` evicts lower numbers first."""
        return 0 if node.id in self._nodes else 1
