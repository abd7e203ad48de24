"""The forward doesn't wait for the last layer of what is loaded from host memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import HOST
from bugs.museum import Bug, Found, patched
from bugs.traffic import through_host_memory


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The copy of layer 2 runs when the forward is over."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    late: list[Any] = []

    def load(usual: Any, host: Any, pool: Any, host_slots: Any, slots: Any, layer: int, *args: Any, **kw: Any) -> None:
        if layer == 2:
            stage.strike()
            late.append(lambda: usual(host, pool, host_slots, slots, layer, *args, **kw))
        else:
            usual(host, pool, host_slots, slots, layer, *args, **kw)

    def run_batch(usual: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = usual(scheduler, *args, **kwargs)
        while late:
            late.pop()()
        return result

    with (
        patched(MHATokenToKVPoolHost, "load_to_device_per_layer", load),
        patched(type(stage.scheduler), "run_batch", run_batch),
    ):
        yield


BUG = Bug(
    title="A load from host memory is not fenced",
    cause="The forward reads the last layer before the copy from host memory has filled it.",
    row=HOST,
    issues=("sglang#36738", "sglang#35769", "trtllm#8813"),
    setup="hicache",
    broken=broken,
    traffic=through_host_memory,
    default=Found("bytes", 1, "the bytes ... copied or loaded ... are not those that ... alice"),
)
