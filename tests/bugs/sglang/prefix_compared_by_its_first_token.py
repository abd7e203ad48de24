"""Two prompts count as alike as soon as their first token is the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`RadixKey.match_at` compares all tokens; here the child's key, which has the first one, is believed."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    def match_at(usual: Any, key: Any, other: Any, offset: int, page_size: int = 1) -> int:
        right = int(usual(key, other, offset, page_size))
        wrong = min(len(key), len(other) - offset)
        if wrong != right:
            stage.strike()
        return wrong

    with patched(RadixKey, "match_at", match_at):
        yield


def traffic(stage: Any) -> None:
    """Bob's prompt has Alice's first token, and another second one."""
    asked, other = stage.tokens("alice", 40), stage.tokens("bob", 40)
    stage.submit("alice", asked, 4)
    finish(stage)
    stage.submit("bob", [asked[0], *other[1:]], 4)
    finish(stage)


BUG = Bug(
    title="A collision in the key of the prefix cache",
    cause="Blocks of two prompts have the same key, and the tokens are not compared: one gets the other's KV.",
    row=IDENTITY,
    issues=("LMCache#4783", "vllm#54342"),
    setup="small",
    broken=broken,
    traffic=traffic,
    default=Found("token", 1, "bob expects ... at position 1 ... written by alice ...: another request's prefix"),
)
