"""When a request leaves the batch, the rows of the others move up; the lengths don't."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import ADDRESS
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`filter_batch` keeps the same rows of all tensors; here the table's rows are taken from the front."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    def filter_batch(usual: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        before = batch.req_pool_indices
        count = len(batch.reqs)
        usual(batch, *args, **kwargs)
        kept = before[: len(batch.reqs)].clone()
        if 0 < len(batch.reqs) < count and not kept.equal(batch.req_pool_indices):
            stage.strike()
            batch.req_pool_indices = kept

    with patched(ScheduleBatch, "filter_batch", filter_batch):
        yield


def traffic(stage: Any) -> None:
    """Alice is the first to end of three."""
    stage.submit("alice", stage.tokens("alice", 24), 5)
    stage.submit("bob", stage.tokens("bob", 31), 12)
    stage.submit("carol", stage.tokens("carol", 17), 12)
    finish(stage)


BUG = Bug(
    title="Rows and lengths of a batch are out of step",
    cause="A request ends, and the rows of the table that stay are not those of the requests that stay.",
    row=ADDRESS,
    issues=("sglang#26329", "vllm#9730"),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found(
        "null_slot",
        1,
        "bob uses the null slot 0 for position 28: padding leaked into a live row, its row of the table is another "
        "request's, or was not filled so far",
    ),
)
