"""A prefix is loaded from the host slots of another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TIER
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_host_memory


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The copy from host memory is given a node's host slots; here they are those 50 slots further on."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    def load(usual: Any, host: Any, pool: Any, host_slots: Any, *args: Any, **kwargs: Any) -> None:
        stage.strike()
        usual(host, pool, (host_slots + 50) % len(host.k_buffer[0]), *args, **kwargs)

    with patched(MHATokenToKVPoolHost, "load_to_device_per_layer", load):
        yield


BUG = Bug(
    title="Host memory gives another request's KV",
    cause="The entry of the host tier leads to slots that were given to another prefix meanwhile.",
    row=TIER,
    issues=("LMCache#4385", "LMCache#4991", "LMCache#5151"),
    setup="hicache",
    broken=broken,
    traffic=through_host_memory,
    default=Found("bytes", 1, "the bytes ... copied or loaded ... are not those that ... alice"),
)
