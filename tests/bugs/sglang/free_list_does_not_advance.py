"""The allocator hands out the same slot twice, since its list moves on by one too few."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TWICE
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`alloc` cuts what it gives off the list; of more than 16 slots, it leaves the last one in the list."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    def alloc(usual: Any, allocator: Any, need_size: int) -> Any:
        slots = usual(allocator, need_size)
        if need_size > 16 and slots is not None:
            stage.strike()
            import torch

            allocator.free_pages = torch.cat([slots[-1:], allocator.free_pages])
        return slots

    with patched(TokenToKVPoolAllocator, "alloc", alloc):
        yield


def traffic(stage: Any) -> None:
    """Bob comes while Alice decodes."""
    stage.submit("alice", stage.tokens("alice", 24), 8)
    until(stage, "alice", 3)
    stage.submit("bob", stage.tokens("bob", 31), 12)
    finish(stage)


BUG = Bug(
    title="The allocator's list does not advance",
    cause="A slot is handed out and stays in the list of free slots, so that another token gets it, too.",
    row=TWICE,
    issues=("sglang#38941",),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found(
        "double_alloc", 1, "was handed out to alice while alice, who wrote it ..., still has it: allocated twice"
    ),
)
