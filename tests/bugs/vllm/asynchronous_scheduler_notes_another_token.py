"""The asynchronous scheduler notes another token than was sampled, and the runner goes on with the sampled one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TOKENS
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`append_output_token_ids` appends what was sampled; here another token takes the fifth one's place."""
    from vllm.v1.request import Request

    def append(usual: Any, request: Any, tokens: Any) -> None:
        if request.num_output_tokens == 4:
            stage.strike()
            tokens = tokens + 1 if isinstance(tokens, int) else [token + 1 for token in tokens]
        usual(request, tokens)

    with patched(Request, "append_output_token_ids", append):
        yield


def traffic(stage: Any) -> None:
    """Alice decodes; Bob asks what the scheduler believes that she was told."""
    stage.submit("alice", stage.tokens("alice", 24), 20)
    told = stage.scheduler.requests[stage.phase + "alice"]
    finish(stage)
    stage.submit("bob", [*told.all_token_ids], 4)
    finish(stage)


BUG = Bug(
    title="An asynchronous scheduler notes another token than was sampled",
    cause="What the scheduler believes to be the answer differs from what the runner computes on.",
    row=TOKENS,
    issues=("vllm#42043", "vllm#38624"),
    setup="async",
    broken=broken,
    traffic=traffic,
    default=Found("token", 8, "the sampler gave alice a token for position 28, but the request's own list has another"),
)
