"""Evicted blocks go back to the pool, and their hashes stay."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PHANTOM
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`BlockLedger.evict_cached_blocks` forgets the hashes of what it gives up; here it doesn't."""
    ledger = stage.allocator.ledger

    def evict_cached_blocks(usual: Any) -> Any:
        kept = dict(ledger.hash_to_block)
        evicted = usual()
        if evicted:
            stage.strike()
            ledger.hash_to_block.update({h: b for h, b in kept.items() if b in evicted})
        return evicted

    with patched(ledger, "evict_cached_blocks", evict_cached_blocks):
        yield


def traffic(stage: Any) -> None:
    """Alice is served, the cached blocks are evicted, and Bob begins like her."""
    asked = stage.tokens("alice", 30)
    stage.submit("alice", asked, 3)
    finish(stage)
    stage.session.evict()
    stage.submit("bob", [*asked, 5, 6], 4)
    finish(stage)


BUG = Bug(
    title="An evicted block keeps its hash",
    cause="The table of hashes still leads to blocks that were evicted, so that a prompt hits what is free.",
    row=PHANTOM,
    issues=("local-inference-lab/vllm#480", "vllm#42273"),
    setup="continuous",
    broken=broken,
    traffic=traffic,
    default=Found(
        "freed", 0, "was given slot ... by the prefix cache, but ... freed it ...: a prefix hit on a freed slot"
    ),
)
