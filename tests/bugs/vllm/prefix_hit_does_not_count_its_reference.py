"""A prefix hit on blocks that are in use doesn't count as one more request that has them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import FREED
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`BlockPool.touch` raises the count of each block; here it leaves those alone that somebody has already."""

    def touch(usual: Any, blocks: Any) -> None:
        held = [block for block in blocks if block.ref_cnt > 0]
        usual(blocks)
        for block in held:
            stage.strike()
            block.ref_cnt -= 1

    with patched(stage.pool, "touch", touch):
        yield


def traffic(stage: Any) -> None:
    """Bob begins like Alice while she decodes, and goes on after her; others come."""
    asked = stage.tokens("alice", 70)
    stage.submit("alice", asked, 8)
    until(stage, "alice", 2)
    stage.submit("bob", [*asked, *stage.tokens("bob", 5)], 40)
    until(stage, "bob", 12)
    stage.submit("carol", stage.tokens("carol", 100), 4)
    finish(stage)


BUG = Bug(
    title="A prefix hit is not counted",
    cause="The count of the requests that have a block is not raised on a hit, and the first of them frees it.",
    row=FREED,
    issues=("vllm#45357", "trtllm#14565"),
    setup="crowded",
    broken=broken,
    traffic=traffic,
    default=Found(
        "double_free",
        45,
        "was released by bob although no request has it: alice let go of it ..., and the prefix cache keeps it since",
        wrong="bob had it all the time; it is the count of its requests that was lost",
    ),
    thorough=Found("cache_structure", 20, "1 requests have block ..., its count says 0"),
)
