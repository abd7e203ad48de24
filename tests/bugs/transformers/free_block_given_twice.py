"""The pool gives a free block and keeps it in its list."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TWICE
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`CachePool.get_free_blocks` takes blocks out of the list; of several, it puts the last one back."""
    pool = stage.cache.pool

    def get_free_blocks(usual: Any, index: int, count: int) -> Any:
        blocks = usual(index, count)
        if count > 1:
            stage.strike()
            pool._free_blocks[index].add_leaves(blocks[-1:])
        return blocks

    with patched(pool, "get_free_blocks", get_free_blocks):
        yield


BUG = Bug(
    title="A block is handed out twice",
    cause="A block stays in the list of free blocks when a request gets it.",
    row=TWICE,
    issues=("sglang#38941", "vllm-ascend#13501"),
    setup="continuous",
    broken=broken,
    traffic=together,
    default=Found(
        "double_alloc", 1, "was handed out to ... while alice, who wrote it ..., still has it: allocated twice"
    ),
)
