"""Blocks of full attention are given back as if a window had passed them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import FREED
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish, until


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`get_num_skipped_tokens` is 0 for full attention; here all but the last 40 tokens are skipped."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    def get_num_skipped_tokens(usual: Any, manager: Any, computed: int) -> int:
        if computed > 72:
            stage.strike()
        return max(0, computed - 40)

    with patched(SingleTypeKVCacheManager, "get_num_skipped_tokens", get_num_skipped_tokens):
        yield


def traffic(stage: Any) -> None:
    """Alice decodes far; Bob comes meanwhile."""
    stage.submit("alice", stage.tokens("alice", 60), 40)
    until(stage, "alice", 20)
    stage.submit("bob", stage.tokens("bob", 50), 10)
    finish(stage)


BUG = Bug(
    title="Blocks of a running request are freed",
    cause="The scheduler takes a full attention layer for a windowed one, and frees blocks that are still read.",
    row=FREED,
    issues=("vllm-ascend#13501", "vllm-ascend#14055", "vllm#45357"),
    setup="uncached",
    broken=broken,
    traffic=traffic,
    default=Found("freed", 3, "alice will read position 0 from slot ... which was freed by ...: use after free"),
)
