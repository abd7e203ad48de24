"""The pool of continuous batching as regions: one per index space of the cache."""

from collections.abc import Sequence

from canary_adapters import JoinedPools, RowPool, WindowPool
from canary_core import PoolAdapter
from canary_transformers.continuous.compat import KVGroup


def paged_cache_pool(groups: Sequence[KVGroup]) -> PoolAdapter:
    """A `PagedAttentionCache`, all layers, K and V. Region names are the engine's attention types.

    Slots are compact: ``block * block_slots + offset``, whatever lies between a layer's pages. The blocks of the trash
    sectors are slots too: padding, which no live token may be in.
    Groups take turns on the same memory.
    """
    return JoinedPools([_pool(group) for group in groups], sharing=[frozenset(group.name for group in groups)])


def _pool(group: KVGroup) -> PoolAdapter:
    pool = RowPool(group.name, group.layers, null_slot=group.null_slot, pool_page=group.pool_page)
    return pool if group.window_tokens is None else WindowPool(pool, group.window_tokens)
