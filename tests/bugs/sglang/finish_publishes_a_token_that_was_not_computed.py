"""A finished request's last token, whose KV was never computed, is put into the prefix cache with the rest."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import EARLY
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`insert_req` inserts up to the last token that was computed; here it takes one more."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def insert_req(usual: Any, cache: Any, request: Any, *, up_to: int, **kwargs: Any) -> None:
        stage.strike()
        row = cache.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        row[up_to] = cache.token_to_kv_pool_allocator.alloc(1)
        usual(cache, request, up_to=up_to + 1, **kwargs)

    with patched(UnifiedRadixCache, "insert_req", insert_req):
        yield


def traffic(stage: Any) -> None:
    """Bob goes on from Alice's whole conversation."""
    asked = stage.tokens("alice", 30)
    stage.submit("alice", asked, 8)
    finish(stage)
    talked = [*asked, *(int(t) for t in stage.requests["alice"].output_ids)]
    stage.submit("bob", [*talked, *stage.tokens("bob", 9)], 6)
    finish(stage)


BUG = Bug(
    title="The last token of a conversation is cached without its KV",
    cause="The slot for the token that was sampled last is published in the prefix cache, though no forward filled it.",
    row=EARLY,
    issues=("vllm#37152", "TGI#2489"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found("unwritten", 2, "bob will read position 37 from slot ..."),
)
