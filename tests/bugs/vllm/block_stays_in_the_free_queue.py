"""A block is handed out and stays at the front of the queue of free blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TWICE
from bugs.museum import Bug, Found, patched
from bugs.traffic import joining


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`get_new_blocks` takes blocks out of the queue; here the last of them is put back."""

    def get_new_blocks(usual: Any, count: int) -> Any:
        blocks = usual(count)
        if blocks:
            stage.strike()
            blocks[-1].ref_cnt = 0
            stage.pool.free_block_queue.prepend_n([blocks[-1]])
        return blocks

    with patched(stage.pool, "get_new_blocks", get_new_blocks):
        yield


BUG = Bug(
    title="A block stays in the queue of free blocks",
    cause="A block is handed out to two requests, since it was not taken out of the queue.",
    row=TWICE,
    issues=("sglang#38941", "vllm-ascend#13501"),
    setup="llama",
    broken=broken,
    traffic=joining,
    default=Found("double_alloc", 8, "was handed out to bob while alice, who wrote it ..., still has it"),
)
