"""The pool of continuous batching as regions: one per index space of the cache."""

from collections.abc import Sequence

from canary_adapters import JoinedPools, RowPool, WindowPool
from canary_core import PoolAdapter, Region, Uncovered
from canary_transformers.continuous.compat import KVGroup


class PagedCachePool(PoolAdapter):
    """A `PagedAttentionCache`, all layers, K and V. Region names are the engine's attention types.

    Slots are compact: ``block * block_slots + offset``, whatever lies between a layer's pages. The blocks of the trash
    sectors are slots too, never written as far as Canary is told, so that a live token read from one is a finding.
    """

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        names = frozenset(group.name for group in groups)
        self._pool = JoinedPools([_pool(group) for group in groups], sharing=[names])

    def regions(self) -> Sequence[Region]:
        """One region per group; window regions where the engine keeps a ring."""
        return self._pool.regions()

    def uncovered(self) -> Sequence[Uncovered]:
        """Nothing: every KV byte of the cache belongs to a region."""
        return self._pool.uncovered()


def _pool(group: KVGroup) -> PoolAdapter:
    pool = RowPool(group.name, group.layers, null_slot=group.null_slot, pool_page=group.pool_page)
    return pool if group.window_tokens is None else WindowPool(pool, group.window_tokens)
