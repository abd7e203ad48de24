"""A layer stores its KV into the buffer of the layer before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LAYOUT
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The number of the last layer's buffer is off by one, in the store and in attention alike."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def _store_kv_layer(usual: Any, pool: Any, layer: int, *args: Any) -> None:
        if layer == 2:
            stage.strike()
        usual(pool, min(layer, 1), *args)

    def get_key_buffer(usual: Any, pool: Any, layer: int) -> Any:
        return usual(pool, min(layer, 1))

    with (
        patched(MHATokenToKVPool, "_store_kv_layer", _store_kv_layer),
        patched(MHATokenToKVPool, "get_key_buffer", get_key_buffer),
        patched(MHATokenToKVPool, "get_value_buffer", get_key_buffer),
    ):
        yield


BUG = Bug(
    title="Two layers share a buffer",
    cause="The number of a layer's buffer is off by one, so that two layers write to the same memory.",
    row=LAYOUT,
    issues=("vllm-ascend#16490", "kvcached#391", "kvcached#424"),
    setup="mha",
    broken=broken,
    traffic=together,
    default=Found(
        "lost_write", 1, "alice should have written a token ... of k.2, whose bytes are what they were before"
    ),
)
