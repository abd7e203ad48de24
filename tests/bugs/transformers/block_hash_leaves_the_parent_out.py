"""A block's hash is made of its own tokens only, not of those before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`compute_block_hash` is not given the hash of the block before."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    def compute_block_hash(usual: Any, parent: Any, tokens: Any) -> int:
        if parent is not None:
            stage.strike()
        return int(usual(None, tokens))

    with patched(cache_allocator, "compute_block_hash", compute_block_hash):
        yield


def traffic(stage: Any) -> None:
    """Bob's second block has the tokens of Alice's second one, after Carol's first one."""
    one, other = stage.tokens("alice", 24), stage.tokens("carol", 9)
    stage.submit("alice", one, 3)
    finish(stage)
    stage.submit("carol", other, 3)
    finish(stage)
    stage.submit("bob", [*other[:8], *one[8:24], 5], 4)
    finish(stage)


BUG = Bug(
    title="A block's hash leaves its parent out",
    cause="Two blocks with the same tokens after different prefixes have the same hash, and one is used for the other.",
    row=IDENTITY,
    issues=("LMCache#4783", "vllm#54342"),
    setup="continuous",
    broken=broken,
    traffic=traffic,
    default=Found("prefix", 8, "bob will read position 8 from slot ... belongs to a sequence that alice wrote"),
)
