"""Frees that were collected as a group are given back twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TWICE
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`free_group_end` frees what was collected; here the list isn't emptied first, and an inner end frees it, too."""
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

    def free_group_end(usual: Any, allocator: Any) -> None:
        pending = allocator.free_group
        usual(allocator)
        if pending:
            import torch

            stage.strike()
            allocator.free(torch.cat(pending))

    with patched(BaseTokenToKVPoolAllocator, "free_group_end", free_group_end):
        yield


BUG = Bug(
    title="A group of frees is freed twice",
    cause="The list of slots that wait to be freed together is not emptied, so that they are freed once more.",
    row=TWICE,
    issues=("sglang#38941",),
    setup="radix_off",
    broken=broken,
    traffic=together,
    default=Found("double_free", 1, "was freed by ... although it was free already: freed twice"),
)
