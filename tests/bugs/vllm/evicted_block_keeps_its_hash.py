"""A cached block is handed out to another request, and its hash stays in the prefix cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PHANTOM
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The block forgets its hash, and the table of hashes still leads to the block."""

    def _maybe_evict_cached_block(usual: Any, block: Any) -> bool:
        key = block.block_hash
        evicted = bool(usual(block))
        if evicted:
            stage.strike()
            stage.pool.cached_block_hash_to_block.insert(key, block)
        return evicted

    with patched(stage.pool, "_maybe_evict_cached_block", _maybe_evict_cached_block):
        yield


def traffic(stage: Any) -> None:
    """Alice is served; Dora decodes while others fill the pool; Bob begins like Alice."""
    asked = stage.tokens("alice", 70)
    stage.submit("alice", asked, 2)
    finish(stage)
    for number in range(4):
        stage.submit(f"other{number}", stage.tokens(f"other{number}", 110), 2)
        finish(stage)
    stage.submit("dora", stage.tokens("dora", 120), 30)
    until(stage, "dora", 3)
    stage.submit("bob", [*asked, *stage.tokens("bob", 3)], 4)
    finish(stage)


BUG = Bug(
    title="A block that was handed out again is still in the prefix cache",
    cause="The table of hashes keeps an evicted block, and the next prompt hits what belongs to another request.",
    row=PHANTOM,
    issues=("local-inference-lab/vllm#480", "vllm#42273"),
    setup="crowded",
    broken=broken,
    traffic=traffic,
    default=Found("unwritten", 30, "bob will read position ... which was handed out again since other... wrote it ..."),
    thorough=Found(
        "cache_structure", 12, "the cache finds block ... under a hash that is not, or no longer, the block's"
    ),
)
