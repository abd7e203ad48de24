"""The prefix cache gets the whole prompt when the first of its chunks is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import EARLY
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`cache_unfinished_req` inserts what was computed; here slots for the rest of the prompt are inserted with it."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def cache_unfinished_req(usual: Any, cache: Any, request: Any, chunked: bool = False, **kwargs: Any) -> None:
        usual(cache, request, chunked=chunked, **kwargs)
        if chunked:
            stage.strike()
            tokens = request.origin_input_ids
            done = len(request.prefix_indices)
            rest = cache.token_to_kv_pool_allocator.alloc(len(tokens) - done)
            slots = torch.cat([request.prefix_indices, rest])
            cache.insert(InsertParams(key=RadixKey(tokens, request.extra_key), value=slots))

    with patched(UnifiedRadixCache, "cache_unfinished_req", cache_unfinished_req):
        yield


def traffic(stage: Any) -> None:
    """Alice's prompt takes two chunks. Bob begins like her and comes in between."""
    asked = stage.tokens("alice", 100)
    stage.submit("alice", asked, 4)
    stage.driver.step()
    stage.submit("bob", [*asked, *stage.tokens("bob", 9)], 6)
    finish(stage)


BUG = Bug(
    title="A prompt is published with its first chunk",
    cause="The prefix cache has the slots of the whole prompt while the later chunks are not computed yet.",
    row=EARLY,
    issues=("vllm#37152", "TGI#2489", "sglang#28468"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found("unwritten", 3, "bob will read position 64 from slot ... which was handed out and never written"),
)
