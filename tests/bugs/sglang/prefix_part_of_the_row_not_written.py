"""A prefix hit doesn't write its slots to the request's row, where those of the row's last owner still are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TABLE
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`write_cache_indices` writes the prefix's slots and the new ones; here only the new ones."""
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    prefixes: list[Any] = []

    def write_cache_indices(usual: Any, *args: Any, **kwargs: Any) -> None:
        prefixes[:] = [prefix for prefix in args[9] if len(prefix)]
        usual(*args, **kwargs)
        prefixes.clear()

    def write(usual: Any, pool: Any, indices: Any, values: Any) -> None:
        if any(values is prefix for prefix in prefixes):
            stage.strike()
            return
        usual(pool, indices, values)

    with (
        patched(allocation, "write_cache_indices", write_cache_indices),
        patched(ReqToTokenPool, "write", write),
    ):
        yield


def traffic(stage: Any) -> None:
    """Alice is served, then Carol, then Bob, who begins like Alice and gets Carol's row."""
    asked = stage.tokens("alice", 40)
    stage.submit("alice", asked, 4)
    finish(stage)
    stage.submit("carol", stage.tokens("carol", 50), 4)
    finish(stage)
    stage.submit("bob", [*asked, *stage.tokens("bob", 3)], 4)
    finish(stage)


BUG = Bug(
    title="A row of the table keeps its last owner's slots",
    cause="On a prefix hit the prefix's slots are not written to the row, which still has those of another request.",
    row=TABLE,
    issues=("trtllm#15546", "vllm#42273"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found("token", 1, "bob expects ... at position 0 ... written by carol"),
)
