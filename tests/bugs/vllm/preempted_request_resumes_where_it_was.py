"""A preempted request keeps its count of computed tokens, and resumes with blocks that nobody has filled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import FREED
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`_preempt_request` frees the blocks and sets the count to 0; here the count stays."""
    scheduler = type(stage.scheduler)

    def preempt(usual: Any, own: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        computed = request.num_computed_tokens
        usual(own, request, *args, **kwargs)
        stage.strike()
        request.num_computed_tokens = computed

    with patched(next(c for c in scheduler.__mro__ if "_preempt_request" in vars(c)), "_preempt_request", preempt):
        yield


def crowd(stage: Any) -> None:
    """Two requests that don't fit: the later one is preempted, and resumes when the first one is done."""
    stage.submit("alice", stage.tokens("alice", 90), 50)
    stage.submit("bob", stage.tokens("bob", 90), 50)
    finish(stage)


BUG = Bug(
    title="A preempted request resumes where it was",
    cause="Blocks of a preempted request are freed, and its count of computed tokens is kept.",
    row=FREED,
    issues=("vllm#45357", "sglang#38319"),
    setup="crowded",
    broken=broken,
    traffic=crowd,
    default=Found("unwritten", 16, "bob will read position 0 from slot ... handed out again since alice wrote it"),
)
