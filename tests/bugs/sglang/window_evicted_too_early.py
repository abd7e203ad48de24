"""Slots of the window are given up while the window still reaches back to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`free_swa_out_of_window_slots` takes the window for 6 tokens shorter than attention does."""
    from sglang.srt.mem_cache import common

    def free_swa_out_of_window_slots(usual: Any, *args: Any, sliding_window_size: int, **kwargs: Any) -> None:
        stage.strike()
        usual(*args, sliding_window_size=sliding_window_size - 6, **kwargs)

    with patched(common, "free_swa_out_of_window_slots", free_swa_out_of_window_slots):
        yield


def traffic(stage: Any) -> None:
    """Alice and Bob leave the window behind them while they decode."""
    stage.submit("alice", stage.tokens("alice", 24), 24)
    stage.submit("bob", stage.tokens("bob", 31), 40)
    finish(stage)


BUG = Bug(
    title="Window slots are given up inside of the window",
    cause="The eviction takes the window for shorter than attention does, and frees slots that are still read.",
    row=WINDOW,
    issues=("sglang#34870", "sglang#27789"),
    setup="swa",
    broken=broken,
    traffic=traffic,
    default=Found(
        "null_slot",
        20,
        "alice uses the null slot 0 in the window pool swa for position 25: ... a window entry was evicted",
    ),
)
