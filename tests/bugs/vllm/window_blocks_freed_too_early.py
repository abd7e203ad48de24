"""Blocks of a sliding window are given back while the window still reaches them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`get_num_skipped_tokens` takes the window for a block shorter than it is."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    def get_num_skipped_tokens(usual: Any, manager: Any, computed: int) -> int:
        stage.strike()
        return int(usual(manager, computed + 32))

    with patched(SlidingWindowManager, "get_num_skipped_tokens", get_num_skipped_tokens):
        yield


def traffic(stage: Any) -> None:
    """Alice and Bob leave the window behind them."""
    stage.submit("alice", stage.tokens("alice", 24), 60)
    stage.submit("bob", stage.tokens("bob", 31), 70)
    finish(stage)


BUG = Bug(
    title="Window blocks are freed too early",
    cause="The scheduler takes the window for a block shorter than attention does.",
    row=WINDOW,
    issues=("sglang#34870", "sglang#27789"),
    setup="window",
    broken=broken,
    traffic=traffic,
    default=Found(
        "freed", 40, "bob will read position 0 from slot ..., which was freed by bob at step ...: use after free"
    ),
)
