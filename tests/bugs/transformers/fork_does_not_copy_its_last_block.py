"""A forked request gets a block for its last tokens, and what its parent had there is not copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PARTIAL
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`copy_blocks` does nothing."""
    allocator = stage.allocator

    def copy_blocks(usual: Any, source: Any, destination: Any) -> None:
        stage.strike()

    with patched(allocator, "copy_blocks", copy_blocks):
        yield


def traffic(stage: Any) -> None:
    """Alice is forked in the middle of a block."""
    stage.submit("alice", stage.tokens("alice", 27), 26)
    until(stage, "alice", 3)
    stage.session.fork(stage.phase + "alice", stage.phase + "bob")
    finish(stage)


BUG = Bug(
    title="A fork's last block is not copied",
    cause="The copy on fork does not run, and the child continues from what its new block held before.",
    row=PARTIAL,
    issues=("transformers#48280", "imp#1189"),
    setup="continuous",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 16, "the bytes ... copied or loaded ... are not those that"),
    thorough=Found("bytes", 1, "the bytes ... copied or loaded ... are not those that"),
)
