"""An abort frees the request's slots at once, while it is still in the running batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import FREED
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`Scheduler.abort_request` only marks a running request, which is released after one more decode; here it is
    released at once."""
    from sglang.srt.mem_cache.common import release_kv_cache

    def abort_request(usual: Any, scheduler: Any, abort: Any) -> None:
        usual(scheduler, abort)
        for request in scheduler.running_batch.reqs:
            if request.rid == abort.rid:
                stage.strike()
                release_kv_cache(request, scheduler.tree_cache, is_insert=False)

    with patched(type(stage.scheduler), "abort_request", abort_request):
        yield


def traffic(stage: Any) -> None:
    """Alice is aborted while she and Bob decode."""
    stage.submit("alice", stage.tokens("alice", 24), 30)
    stage.submit("bob", stage.tokens("bob", 31), 16)
    until(stage, "alice", 6)
    stage.driver.abort(f"{stage.phase}alice")
    finish(stage)


BUG = Bug(
    title="An abort frees a running request's slots too early",
    cause="The abort releases the slots of a request that is still in the batch of the next forward.",
    row=FREED,
    issues=("sglang#38319", "vllm#45357", "trtllm#12540"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found("freed", 1, "alice will read position ... which was freed by alice at step ...: use after free"),
)
