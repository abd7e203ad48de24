"""A flush empties the allocator, not the prefix cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PHANTOM
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`flush_cache` resets the tree, then the pools; here the tree stays."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def reset(usual: Any, cache: Any) -> None:
        stage.strike()

    with patched(UnifiedRadixCache, "reset", reset):
        yield


def traffic(stage: Any) -> None:
    """Alice is served, the cache is flushed, Bob begins like her."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 4)
    finish(stage)
    stage.scheduler.flush_cache()
    stage.submit("bob", [*asked, *stage.tokens("bob", 3)], 4)
    finish(stage)


BUG = Bug(
    title="A flush leaves the prefix cache as it is",
    cause="The flush gives all slots back to the allocator and leaves the tree that names them.",
    row=PHANTOM,
    issues=("local-inference-lab/vllm#480", "vllm#42273"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found("unwritten", 1, "bob will read position 0 from slot ... alice ..."),
)
