"""Prefix caches: what is in them, and how it is evicted. How they are walked is in `canary_sglang.tree`."""

from collections.abc import Callable
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


def evict_nodes(cache: Any, doomed: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Evicts the nodes of which `doomed` marks a slot, and all below them, as far as they are not in use; gives the
    number of tokens. Where the kind of cache doesn't let us choose, all that is not in use."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if type(cache).__name__ != "RadixCache":
        full = cache.full_evictable_size() if cache.supports_swa() else cache.evictable_size()
        window = cache.swa_evictable_size() if cache.supports_swa() else 0
        if not full and not window:
            return 0
        return int(cache.evict(EvictParams(num_tokens=full, swa_num_tokens=window)).num_tokens_evicted)
    order = _Doomed(cache.root_node, doomed)
    if not order.tokens:
        return 0
    usual = cache.eviction_strategy
    cache.eviction_strategy = order
    try:
        return int(cache.evict(EvictParams(num_tokens=order.tokens)).num_tokens_evicted)
    finally:
        cache.eviction_strategy = usual


class _Doomed:
    """An eviction strategy of `RadixCache` under which chosen nodes go first, those below before those above.
    ``tokens``: how many those have that are not in use."""

    def __init__(self, root: Any, doomed: Callable[[torch.Tensor], torch.Tensor]) -> None:
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
