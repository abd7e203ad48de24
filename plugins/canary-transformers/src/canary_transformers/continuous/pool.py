"""The pool of continuous batching as regions: one per index space of the cache."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from canary_adapters import JoinedPools, RowPool, WindowPool
from canary_core import PoolAdapter, Region
from canary_transformers.continuous import compat


class PagedCachePool(JoinedPools):
    """A `PagedAttentionCache`, all layers, K and V. Region names are the engine's attention types.

    Slots are compact: ``block * block_slots + offset``, whatever lies between a layer's pages. The blocks of the trash
    sectors are slots too: padding, which no live token may be in. Groups take turns on the same memory.
    """

    def __init__(self, cache: Any) -> None:
        groups = compat.kv_groups(cache)
        super().__init__([_pool(group) for group in groups], sharing=[frozenset(group.name for group in groups)])
        self._cache = cache

    def regions(self) -> Sequence[Region]:
        """One for each index space. Of the padding the first half is only read, the second only written: there padded
        rows, which attend to nothing, may rightly leave NaN."""
        return tuple(replace(region, null_reads=region.null_slots // 2) for region in super().regions())

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """The engine's own tensors. Host memory of waiting requests is not guarded."""
        return compat.pool_tensors(self._cache)


def _pool(group: compat.KVGroup) -> PoolAdapter:
    pool = RowPool(group.name, group.layers, null_slot=group.null_slots, pool_page=group.pool_page)
    return pool if group.window_tokens is None else WindowPool(pool, group.window_tokens)
