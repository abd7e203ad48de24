"""A block's hash is made of its own tokens only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import IDENTITY
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`hash_block_tokens` is not given the hash of the block before."""
    from vllm.v1.core import kv_cache_utils

    def hash_block_tokens(usual: Any, function: Any, parent: Any, tokens: Any, extra: Any = None) -> Any:
        if parent:
            stage.strike()
        return usual(function, None, tokens, extra)

    with patched(kv_cache_utils, "hash_block_tokens", hash_block_tokens):
        yield


def traffic(stage: Any) -> None:
    """Bob's second block has the tokens of Alice's second one, after Carol's first one."""
    one, other = stage.tokens("alice", 70), stage.tokens("carol", 40)
    stage.submit("alice", one, 2)
    finish(stage)
    stage.submit("carol", other, 2)
    finish(stage)
    stage.submit("bob", [*other[:32], *one[32:70]], 4)
    finish(stage)


BUG = Bug(
    title="A block's hash leaves the block before it out",
    cause="Two blocks with the same tokens after different prefixes have one hash, and one is taken for the other.",
    row=IDENTITY,
    issues=("LMCache#4783", "vllm#54342"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("prefix", 6, "bob will read position 32 from slot ... belongs to a sequence that alice wrote"),
)
