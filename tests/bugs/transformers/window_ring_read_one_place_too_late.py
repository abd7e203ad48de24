"""The ring of a sliding window is read from a token too late."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`get_read_indices` takes the position for one more than it is, once the window is full."""
    from transformers.generation.continuous_batching.cache_allocators.sliding_attention import (
        SlidingAttentionCacheAllocator,
    )

    def get_read_indices(usual: Any, allocator: Any, request: str, past: int, new: int) -> Any:
        if past >= allocator.sliding_window:
            stage.strike()
            past += 1
        return usual(allocator, request, past, new)

    with patched(SlidingAttentionCacheAllocator, "get_read_indices", get_read_indices):
        yield


BUG = Bug(
    title="A window's ring is read from one place too far",
    cause="The first place of the ring that is read is that of the next step: a stale token is read for the last one.",
    row=WINDOW,
    issues=("transformers#47911", "transformers#47708"),
    setup="continuous_windows",
    broken=broken,
    traffic=together,
    default=Found("position", 2, "bob will read position ... but bob wrote position ... there ...: wrong slot mapping"),
)
