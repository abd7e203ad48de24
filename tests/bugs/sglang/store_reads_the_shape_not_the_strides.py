"""A store kernel takes the rows of K for contiguous; they are views of a wider tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LAYOUT
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The kernel computes the place of a slot from the pool's shape, as if it were ``[heads, slots, size]``."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def _store_kv_layer(usual: Any, pool: Any, layer: int, loc: Any, k: Any, v: Any) -> None:
        stage.strike()
        for buffer, new in ((pool.k_buffer[layer], k), (pool.v_buffer[layer], v)):
            slots, heads, size = buffer.shape
            buffer.view(heads, slots, size)[:, loc] = new.view(-1, heads, size).transpose(0, 1)

    with patched(MHATokenToKVPool, "_store_kv_layer", _store_kv_layer):
        yield


BUG = Bug(
    title="A kernel reads the pool's layout from its shape",
    cause="The store takes heads for the outer dimension of the pool, so that a slot's KV lies in two other slots.",
    row=LAYOUT,
    issues=("LMCache#4463", "kvcached#424"),
    setup="mha",
    broken=broken,
    traffic=together,
    default=Found("lost_write", 1, "should have written a token ... whose bytes are what they were before"),
)
