"""A request ends, another one takes its place in the batch, and its row of the block table stays behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import ADDRESS
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`MultiGroupBlockTable.move_row` does nothing."""
    tables = stage.runner.input_batch.block_table

    def move_row(usual: Any, source: int, target: int) -> None:
        stage.strike()

    with patched(tables, "move_row", move_row):
        yield


def traffic(stage: Any) -> None:
    """Alice is the first to end of three."""
    stage.submit("alice", stage.tokens("alice", 24), 4)
    stage.submit("bob", stage.tokens("bob", 31), 12)
    stage.submit("carol", stage.tokens("carol", 17), 12)
    finish(stage)


BUG = Bug(
    title="A row of the block table is not moved",
    cause="When the batch closes up, the request that moves into the gap gets the block table of the one that ended.",
    row=ADDRESS,
    issues=("vllm#9730", "vllm#54498"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found(
        "null_slot",
        1,
        "carol uses the null slot 0 for position 0: padding leaked into a live row",
        wrong="the row is that of a request that has ended, which was cleared; nothing was padded",
    ),
    thorough=Found(
        "read_table", 2, "slot_mapping of CPUAttentionMetadata names slot ... for which the engine keeps slot"
    ),
)
