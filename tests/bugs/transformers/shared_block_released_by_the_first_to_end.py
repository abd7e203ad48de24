"""A block that two requests share is released as soon as one of them ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import FREED
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`BlockLedger.release` counts who still has the block; here the count is forgotten, and nothing is cached."""
    ledger = stage.allocator.ledger

    def release(usual: Any, block: int, no_cache: bool = False) -> bool:
        if ledger.shared_ref_counts.pop(block, 1) > 1:
            stage.strike()
            no_cache = True
        return bool(usual(block, no_cache))

    with patched(ledger, "release", release):
        yield


def traffic(stage: Any) -> None:
    """Bob begins like Alice while she decodes, and goes on after her."""
    asked = stage.tokens("alice", 24)
    stage.submit("alice", asked, 9)
    until(stage, "alice", 2)
    stage.submit("bob", [*asked, *stage.tokens("bob", 5)], 14)
    finish(stage)


BUG = Bug(
    title="A shared block is released by the first of its requests to end",
    cause="The count of the requests that share a block is lost, and the block is freed while one still reads it.",
    row=FREED,
    issues=("trtllm#14565", "vllm#45357", "vllm-ascend#14055"),
    setup="continuous",
    broken=broken,
    traffic=traffic,
    default=Found("freed", 1, "bob will read position 0 from slot ... which was freed by ...: use after free"),
)
