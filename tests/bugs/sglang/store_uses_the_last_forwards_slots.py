"""The store reads its slots from a static buffer that still has those of the forward before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TABLE
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """As in a captured graph whose buffer of ``out_cache_loc`` was not filled before the replay."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    last: dict[int, Any] = {}

    def _store_kv_layer(usual: Any, pool: Any, layer: int, loc: Any, k: Any, v: Any) -> None:
        stale = last.get(layer)
        last[layer] = loc.clone()
        if len(loc) == 2 and stale is not None and len(stale) == 2:
            stage.strike()
            loc = stale
        usual(pool, layer, loc, k, v)

    with patched(MHATokenToKVPool, "_store_kv_layer", _store_kv_layer):
        yield


BUG = Bug(
    title="A replayed graph stores to the slots of the forward before",
    cause="The static buffer with the slots to write is not filled before the captured graph is replayed.",
    row=TABLE,
    issues=("trtllm#15546", "vllm#42273"),
    setup="mha",
    broken=broken,
    traffic=together,
    default=Found("lost_write", 1, "alice should have written a token at position ... to slot ... of k.0"),
)
