"""A forked request's last block is a copy of another block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import ADDRESS
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`copy_blocks` copies from the first block of whoever has one, not from the parent's."""
    allocator = stage.allocator

    def copy_blocks(usual: Any, source: Any, destination: Any) -> None:
        stage.strike()
        other = allocator.block_table[stage.phase + "carol"][0]
        usual([other for _ in source], destination)

    with patched(allocator, "copy_blocks", copy_blocks):
        yield


def traffic(stage: Any) -> None:
    """Carol decodes; Alice is forked in the middle of a block."""
    stage.submit("carol", stage.tokens("carol", 20), 30)
    until(stage, "carol", 2)
    stage.submit("alice", stage.tokens("alice", 27), 26)
    until(stage, "alice", 3)
    stage.session.fork(stage.phase + "alice", stage.phase + "bob")
    finish(stage)


BUG = Bug(
    title="A fork's last block is a copy of another request's",
    cause="The source of the copy on fork is another request's block, so the child continues with its KV.",
    row=ADDRESS,
    issues=("sglang#26329", "vllm#9730"),
    setup="continuous",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 16, "the bytes ... copied or loaded ... are not those that"),
    thorough=Found("bytes", 1, "the bytes ... copied or loaded ... are not those that"),
)
