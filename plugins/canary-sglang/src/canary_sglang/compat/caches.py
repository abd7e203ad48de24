"""Prefix caches: what is in them, and how it is evicted. How they are walked is in `canary_sglang.tree`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def keeps_host_copies(scheduler: Any) -> bool:
    """Whether what is evicted from the device may come back from host memory."""
    args = scheduler.server_args
    return any(getattr(args, name, False) for name in ("enable_hierarchical_cache", "enable_lmcache"))


def cached_slots(cache: Any) -> torch.Tensor | None:
    """Full slots of all tokens in the prefix cache; None where there are none."""
    size = cache.total_size() if hasattr(cache, "all_values_flatten") else 0
    if not (size[0] if isinstance(size, tuple) else size):
        return None
    slots: torch.Tensor = cache.all_values_flatten()
    return slots


def cached_states(cache: Any) -> torch.Tensor | None:
    """Slots of all recurrent states in the prefix cache; None where it keeps none."""
    if not cache.supports_mamba():
        return None
    slots: torch.Tensor = cache.all_mamba_values_flatten()
    return slots


def evict_states(cache: Any) -> int:
    """Evicts all recurrent states that are not in use; gives their number. The KV of the same tokens stays, of no use
    without them. The kinds of cache that keep states don't let us choose."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    states = int(cache.mamba_evictable_size())
    cache.evict(EvictParams(num_tokens=0, mamba_num=states))
    return states - int(cache.mamba_evictable_size())


Doomed = Callable[[torch.Tensor], torch.Tensor]
"""Which of some full slots have to go."""


def evict_nodes(cache: Any, doomed: Doomed) -> int:
    """Evicts the nodes of which `doomed` marks a slot, and all below them, as far as they are not in use; gives the
    number of tokens. Where the kind of cache doesn't let us choose, all that is not in use."""
    if type(cache).__name__ == "RadixCache":
        return _evict_from_radix(cache, doomed)
    full = cache.full_evictable_size() if cache.supports_swa() else cache.evictable_size()
    window = cache.swa_evictable_size() if cache.supports_swa() else 0
    if _lets_us_choose(cache):
        with _only_doomed(cache, doomed):
            return _evict(cache, full)
    return _evict(cache, full, window)


def _evict(cache: Any, tokens: int, window_tokens: int = 0) -> int:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if not tokens and not window_tokens:
        return 0
    return int(cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=window_tokens)).num_tokens_evicted)


def _lets_us_choose(cache: Any) -> bool:
    """Whether the cache asks a core of its own, in Python or Rust, for one leaf after the other."""
    core = getattr(cache, "tree_core", None)
    return type(cache).__name__ == "UnifiedRadixCache" and all(
        hasattr(owner, name)
        for owner, name in (
            (core, "evict_device_next_node"),
            (core, "collect_full_device_indices"),
            (cache, "root_node_handle"),
        )
    )


@contextmanager
def _only_doomed(cache: Any, doomed: Doomed) -> Iterator[None]:
    """Meanwhile the core of a `UnifiedRadixCache` names for eviction only leaves on whose way from the root there is a
    doomed slot, until it has been through all of them; what becomes a leaf by that has its turn, too."""
    core = cache.tree_core
    advance = core.evict_device_next_node

    def next_doomed(*args: Any, **kwargs: Any) -> Any:
        while True:
            step = advance(*args, **kwargs)
            # With something that it has freed the cache has to deal by itself.
            if step.node_id is None or step.device_frees or step.host_frees:
                return step
            if bool(doomed(core.collect_full_device_indices(step.node_id, cache.root_node_handle())).any()):
                return step

    core.evict_device_next_node = next_doomed
    try:
        yield
    finally:
        del core.evict_device_next_node


def _evict_from_radix(cache: Any, doomed: Doomed) -> int:
    order = _Doomed(cache.root_node, doomed)
    if not order.tokens:
        return 0
    usual = cache.eviction_strategy
    cache.eviction_strategy = order
    try:
        return _evict(cache, order.tokens)
    finally:
        cache.eviction_strategy = usual


class _Doomed:
    """An eviction strategy of `RadixCache` under which chosen nodes go first, those below before those above.
    ``tokens``: how many those have that are not in use."""

    def __init__(self, root: Any, doomed: Doomed) -> None:
        self._nodes: set[int] = set()
        self.tokens = 0
        todo = [(node, False) for node in root.children.values()]
        while todo:
            node, under = todo.pop()
            under = under or bool(doomed(node.value).any())
            if under and node.lock_ref == 0:
                self._nodes.add(node.id)
                self.tokens += len(node.value)
            todo += [(child, under) for child in node.children.values()]

    def get_priority(self, node: Any) -> int:
        """Lower goes first."""
        return 0 if node.id in self._nodes else 1
