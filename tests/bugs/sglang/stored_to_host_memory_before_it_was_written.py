"""The copy to host memory reads a layer before the forward has written it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import HOST
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_host_memory


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The copy reads K of layer 1 as it was before the last forward."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    before: list[Any] = [None]

    def run_batch(usual: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        before[0] = stage.pool.k_buffer[1].clone()
        return usual(scheduler, *args, **kwargs)

    def backup(usual: Any, host: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
        now = pool.k_buffer[1].clone()
        if before[0] is not None and not now.equal(before[0]):
            stage.strike()
            pool.k_buffer[1].copy_(before[0])
        usual(host, pool, *args, **kwargs)
        pool.k_buffer[1].copy_(now)

    with (
        patched(type(stage.scheduler), "run_batch", run_batch),
        patched(MHATokenToKVPoolHost, "backup_from_device_all_layer", backup),
    ):
        yield


BUG = Bug(
    title="KV is stored before it was written",
    cause="The copy to host memory starts before the forward has written the slots, and stores what lay there.",
    row=HOST,
    issues=("sglang#28468", "vllm#45704", "vllm#47282"),
    setup="hicache",
    broken=broken,
    traffic=through_host_memory,
    default=Found("bytes", 16, "the bytes ... copied or loaded ... are not those that ... alice"),
)
