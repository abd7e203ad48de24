"""The block tables of two groups of layers name the same memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LAYOUT
from bugs.museum import Bug, Found, Missed, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`MultiGroupBlockTable.add_row` gives each group its own blocks; here the second one gets the first one's."""
    tables = stage.runner.input_batch.block_table

    def add_row(usual: Any, blocks: Any, row: int) -> None:
        stage.strike()
        usual((blocks[0], blocks[0], *blocks[2:]), row)

    with patched(tables, "add_row", add_row):
        yield


BUG = Bug(
    title="Two groups of layers use the same blocks",
    cause="The block ids of full and of sliding layers are mixed up, and both write to the same memory.",
    row=LAYOUT,
    issues=("vllm-ascend#16490", "kvcached#391", "LMCache#4463"),
    setup="hybrid",
    broken=broken,
    traffic=together,
    default=Missed("both groups name the same slots in one forward, and the table of each is checked alone"),
    thorough=Found(
        "bytes", 1, "in the window pool ... changed between the store of layer 0 and the end of the forward"
    ),
)
