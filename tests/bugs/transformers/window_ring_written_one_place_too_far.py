"""A sliding window's ring is written one place further than it is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`get_write_indices` takes the position for one more than it is, once the window is full."""
    from transformers.generation.continuous_batching.cache_allocators.sliding_attention import (
        SlidingAttentionCacheAllocator,
    )

    def get_write_indices(usual: Any, allocator: Any, request: str, past: int, new: int) -> Any:
        if past >= allocator.sliding_window:
            stage.strike()
            past += 1
        return usual(allocator, request, past, new)

    with patched(SlidingAttentionCacheAllocator, "get_write_indices", get_write_indices):
        yield


BUG = Bug(
    title="A window's ring is written one place too far",
    cause="Reads and writes of the ring disagree by one place after the first time round.",
    row=WINDOW,
    issues=("sglang#27789", "ATOM#1417"),
    setup="continuous_windows",
    broken=broken,
    traffic=together,
    default=Found(
        "position", 2, "bob will read position 36 from slot ..., but bob wrote position 0 there ...: wrong slot mapping"
    ),
)
