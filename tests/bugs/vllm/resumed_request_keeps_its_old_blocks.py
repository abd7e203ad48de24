"""A resumed request's new blocks are appended to those that it had before it was preempted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TABLE
from bugs.museum import Bug, Found, patched
from bugs.vllm.preempted_request_resumes_where_it_was import crowd


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The scheduler tells the runner which requests resume, whose blocks are replaced; here it does not."""
    scheduler = type(stage.scheduler)

    def make(usual: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        data = usual(own, *args, **kwargs)
        if data.resumed_req_ids:
            stage.strike()
            data.resumed_req_ids = set()
        return data

    name = "_make_cached_request_data"
    with patched(next(c for c in scheduler.__mro__ if name in vars(c)), name, make):
        yield


BUG = Bug(
    title="A resumed request keeps its old blocks",
    cause="The runner is not told that a request resumes, and its row still begins with blocks that were freed.",
    row=TABLE,
    issues=("vllm#42273", "trtllm#15546"),
    setup="crowded",
    broken=broken,
    traffic=crowd,
    default=Found("position", 4, "bob will read position 0 from slot ..., but bob wrote position ... there ..."),
)
