"""A request lets go of its prefix in the cache when it begins to decode, not when it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import FREED
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`cache_unfinished_req` ends with a lock on the node that the request reads; here that lock is taken back."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def cache_unfinished_req(usual: Any, cache: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        usual(cache, request, *args, **kwargs)
        stage.strike()
        cache.unpin(request)
        request.last_node = cache.root_node_handle()
        request.lock_receipt = cache.inc_lock_ref(request.last_node).to_dec_params()

    with patched(UnifiedRadixCache, "cache_unfinished_req", cache_unfinished_req):
        yield


def traffic(stage: Any) -> None:
    """Alice decodes while others fill the pool, so that what nobody holds is evicted."""
    stage.submit("alice", stage.tokens("alice", 40), 60)
    until(stage, "alice", 3)
    for number in range(3):
        stage.submit(f"other{number}", stage.tokens(f"other{number}", 60), 2)
    finish(stage)


BUG = Bug(
    title="The lock on a running request's prefix is taken back too early",
    cause="The prefix cache counts the prefix of a decoding request as held by nobody, and evicts it.",
    row=FREED,
    issues=("sglang#24193", "trtllm#14565", "vllm-ascend#14055"),
    setup="small",
    broken=broken,
    traffic=traffic,
    default=Found(
        "position",
        12,
        "alice will read position 0 from slot ..., but other1 wrote position 7 there",
        wrong="the mapping is right, and the prefix cache had given the slot up while alice had it",
    ),
)
