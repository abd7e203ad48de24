"""Rows of padding compute NaN, which is stored in the null slot that padding reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PADDING
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The store of a decode gets one row more, of padding, for slot 0."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def _store_kv_layer(usual: Any, pool: Any, layer: int, loc: Any, k: Any, v: Any) -> None:
        usual(pool, layer, loc, k, v)
        if len(loc) == 2:
            stage.strike()
            pool.k_buffer[layer][0] = float("nan")
            pool.v_buffer[layer][0] = float("nan")

    with patched(MHATokenToKVPool, "_store_kv_layer", _store_kv_layer):
        yield


BUG = Bug(
    title="Padding writes NaN to the null slot",
    cause="Padded rows of a batch compute NaN, which stays in slot 0, where all padding reads it.",
    row=PADDING,
    issues=("sglang#32477", "sglang#35351"),
    setup="mha",
    broken=broken,
    traffic=together,
    default=Found("non_finite", 1, "NaN or infinite values got into the null slot 0 of k.0"),
)
