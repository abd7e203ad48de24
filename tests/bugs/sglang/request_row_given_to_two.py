"""Two requests get the same row of the table, since its number was freed twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TWICE
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`ReqToTokenPool.free_rows` puts each number back twice."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    def free_rows(usual: Any, pool: Any, indices: Any) -> None:
        stage.strike()
        usual(pool, indices)
        usual(pool, indices)

    with patched(ReqToTokenPool, "free_rows", free_rows):
        yield


def traffic(stage: Any) -> None:
    """Alice ends while Dora decodes; then Bob and Carol come together."""
    stage.submit("dora", stage.tokens("dora", 12), 24)
    stage.submit("alice", stage.tokens("alice", 20), 3)
    until(stage, "alice", 3)
    stage.submit("bob", stage.tokens("bob", 24), 8)
    stage.submit("carol", stage.tokens("carol", 31), 8)
    finish(stage)


BUG = Bug(
    title="Two requests share a row of the block table",
    cause="The number of a finished request's row is put back twice, so that the next two requests get the same row.",
    row=TWICE,
    issues=("sglang#38941", "sglang#24193"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found(
        "write_slot",
        1,
        "bob writes position 0 to slot ..., but will read it from slot ...: the slot list and the table disagree",
    ),
)
