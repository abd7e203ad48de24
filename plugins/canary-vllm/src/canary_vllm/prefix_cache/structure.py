"""Rules for a scheduler's block pool, whatever the blocks hold."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from canary_adapters import BlockBreach, BlockSweep, count_breaches, free_blocks


def sweep(manager: Any) -> BlockSweep:
    """Looks at all blocks of vLLM's `KVCacheManager` between two calls of its scheduler. Only impossible states are
    reported: others than requests may have blocks, too."""
    pool = manager.block_pool
    counts = {block.block_id: block.ref_cnt for block in pool.blocks if not block.is_null}
    cached = sum(block.block_hash is not None for block in pool.blocks)
    free = Counter(block.block_id for block in free_blocks(pool))
    return BlockSweep.of(cached, chain(count_breaches(counts, _held(manager), free), _stale(pool)))


def _stale(pool: Any) -> Iterator[BlockBreach]:
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        for block in blocks.values() if isinstance(blocks, dict) else (blocks,):
            if key != block.block_hash and key not in pool.cached_block_hashes_by_block.get(block.block_id, ()):
                text = f"the cache finds block {block.block_id} under a hash that is not, or no longer, the block's"
                yield BlockBreach("hash_stale", block.block_id, text)


def _held(manager: Any) -> Counter[int]:
    """In how many requests each block is."""
    every = (one for one in manager.coordinator.single_type_managers if one.block_pool is manager.block_pool)
    held = ({b.block_id for b in blocks if not b.is_null} for one in every for blocks in one.req_to_blocks.values())
    return Counter(chain.from_iterable(held))
