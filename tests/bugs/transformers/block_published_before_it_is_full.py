"""A block's hash is registered when a part of its tokens is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import EARLY
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`count_new_complete_blocks` counts the blocks that a forward completes; here it rounds up."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    def count_new_complete_blocks(usual: Any, cache: Any, state: Any, request_len: int) -> dict[str, int]:
        counted: dict[str, int] = usual(cache, state, request_len)
        if state.remaining_prefill_tokens:
            stage.strike()
            return {name: counted.get(name, 0) + 1 for name in cache.cache_allocators}
        return counted

    with patched(PagedAttentionCache, "count_new_complete_blocks", count_new_complete_blocks):
        yield


def traffic(stage: Any) -> None:
    """Alice's prompt is read in parts. Bob, who begins like her, comes in between."""
    asked = stage.tokens("alice", 39)
    stage.submit("alice", asked, 4)
    stage.step()
    stage.submit("bob", asked[:33], 4)
    finish(stage)


BUG = Bug(
    title="A block is published before it is full",
    cause="The number of blocks that a chunk of a prompt completes is rounded up, and the last one is not full yet.",
    row=EARLY,
    issues=("vllm#37152", "TGI#2489"),
    setup="continuous",
    broken=broken,
    traffic=traffic,
    default=Found("unwritten", 3, "bob will read position 20 from slot ..."),
)
