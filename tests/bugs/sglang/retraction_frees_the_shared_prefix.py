"""A retraction frees the whole row of the request, with the prefix that it shares."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import FREED
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`release_kv_cache` leaves the first ``cache_protected_len`` slots to the prefix cache; not here, where nothing is
    inserted."""
    from sglang.srt.mem_cache import common

    def release_kv_cache(usual: Any, request: Any, tree: Any, is_insert: bool = True) -> None:
        if not is_insert and request.kv.cache_protected_len:
            stage.strike()
            request.kv.cache_protected_len = 0
        usual(request, tree, is_insert)

    with patched(common, "release_kv_cache", release_kv_cache):
        yield


def traffic(stage: Any) -> None:
    """Alice and Bob begin alike and decode. Bob is retracted, as in a full pool."""
    asked = stage.tokens("alice", 30)
    stage.submit("alice", asked, 24)
    until(stage, "alice", 2)
    stage.submit("bob", [*asked, *stage.tokens("bob", 6)], 10)
    until(stage, "bob", 3)
    batch = stage.scheduler.running_batch
    order, enough = batch._get_decode_retraction_order, batch.check_decode_mem
    batch._get_decode_retraction_order = lambda requests: sorted(
        range(len(requests)), key=lambda i: requests[i] is stage.requests["bob"]
    )
    answers = [False]
    batch.check_decode_mem = lambda *args, **kwargs: answers.pop() if answers else enough(*args, **kwargs)
    stage.step()
    batch._get_decode_retraction_order = order
    batch.check_decode_mem = enough
    finish(stage)


BUG = Bug(
    title="A retraction frees the prefix that others share",
    cause="The retracted request gives back its whole row, with slots that belong to the prefix cache.",
    row=FREED,
    issues=("sglang#24193", "OSCAR#4", "vllm-ascend#13501"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found("double_free", 0, "was released by bob although no request has it: ... released twice"),
)
