"""A fork copies the page of one layer of each block, and not those of the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LAYOUT
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`copy_blocks` copies whole blocks; here the second half of each stays as it was."""
    allocator = stage.allocator

    def copy_blocks(usual: Any, source: Any, destination: Any) -> None:
        stage.strike()
        half = allocator.bytes_per_block // 2
        kept = allocator._copy_view[destination, half:].clone()
        usual(source, destination)
        allocator._copy_view[destination, half:] = kept

    with patched(allocator, "copy_blocks", copy_blocks):
        yield


def traffic(stage: Any) -> None:
    """Alice is forked in the middle of a block."""
    stage.submit("alice", stage.tokens("alice", 16), 26)
    until(stage, "alice", 3)
    stage.session.fork(stage.phase + "alice", stage.phase + "bob")
    finish(stage)


BUG = Bug(
    title="A fork copies a part of its block",
    cause="The size of a block is taken for smaller than it is, and the last layers are not copied.",
    row=LAYOUT,
    issues=("kvcached#391", "vllm-ascend#16490"),
    setup="continuous",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 16, "the bytes ... copied or loaded ... are not those that"),
    thorough=Found("bytes", 1, "the bytes ... copied or loaded ... are not those that"),
)
