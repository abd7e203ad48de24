"""What comes back from host memory has K and no V."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PARTIAL
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_host_memory


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The copy of each layer copies K and V; here V of the device stays as it is."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    def load(usual: Any, host: Any, pool: Any, host_slots: Any, slots: Any, layer: int, *args: Any, **kw: Any) -> None:
        stage.strike()
        before = pool.v_buffer[layer].clone()
        usual(host, pool, host_slots, slots, layer, *args, **kw)
        pool.v_buffer[layer].copy_(before)

    with patched(MHATokenToKVPoolHost, "load_to_device_per_layer", load):
        yield


BUG = Bug(
    title="Only K comes back from host memory",
    cause="The copy from host memory leaves out one half of each layer.",
    row=PARTIAL,
    issues=("sglang#38031", "sglang#31427"),
    setup="hicache",
    broken=broken,
    traffic=through_host_memory,
    default=Found("bytes", 1, "the bytes ... copied or loaded ... are not those that ... alice"),
)
