"""Of a chunk that ends behind the window's end, other tokens are stored than those that the window needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`get_write_indices` gives the places of a chunk in the order of the ring, not from where the chunk begins."""
    from transformers.generation.continuous_batching.cache_allocators.sliding_attention import (
        SlidingAttentionCacheAllocator,
    )

    def get_write_indices(usual: Any, allocator: Any, request: str, past: int, new: int) -> Any:
        places = usual(allocator, request, past, new)
        if new > 1 and past % allocator.sliding_window + new > allocator.sliding_window:
            stage.strike()
            return sorted(places)
        return places

    with patched(SlidingAttentionCacheAllocator, "get_write_indices", get_write_indices):
        yield


def traffic(stage: Any) -> None:
    """A prompt that is longer than the window, read in parts."""
    stage.submit("alice", stage.tokens("alice", 40), 6)
    finish(stage)


BUG = Bug(
    title="A chunk that goes round the ring is stored in another order",
    cause="Places of a chunk that passes the ring's end are sorted, so its tokens lie in each other's places.",
    row=WINDOW,
    issues=("transformers#47708", "sglang#30339"),
    setup="continuous_windows",
    broken=broken,
    traffic=traffic,
    default=Found("position", 2, "alice will read position ... but alice wrote position ... there"),
)
