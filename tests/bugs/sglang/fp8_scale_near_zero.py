"""K is divided by a scale that is far too small before it is stored as FP8."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import QUANTIZED
from bugs.museum import Bug, Missed, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The scale of layer 1 is that of an unloaded checkpoint: nearly zero."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def set_kv_buffer(usual: Any, pool: Any, layer: Any, loc: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> None:
        if layer.layer_id == 1:
            stage.strike()
            k = k / 1e-6
        usual(pool, layer, loc, k, v, *args, **kwargs)

    with patched(MHATokenToKVPool, "set_kv_buffer", set_kv_buffer):
        yield


BUG = Bug(
    title="The scale of FP8 keys was never loaded",
    cause="Keys are divided by a scale near zero, and all of them become the largest number of FP8.",
    row=QUANTIZED,
    issues=("trtllm#2699", "vllm#50702"),
    setup="fp8",
    broken=broken,
    traffic=together,
    default=Missed("what is stored is what was computed; whether the numbers are right is not looked at"),
)
