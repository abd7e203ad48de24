"""K is divided by a scale that is far too small before it is stored as FP8."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import QUANTIZED
from bugs.museum import Bug, Missed, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The scale is that of an unloaded checkpoint: nearly zero."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def do_kv_cache_update(usual: Any, impl: Any, layer: Any, key: Any, *args: Any) -> None:
        stage.strike()
        usual(impl, layer, key / 1e-6, *args)

    with patched(CPUAttentionBackendImpl, "do_kv_cache_update", do_kv_cache_update):
        yield


BUG = Bug(
    title="FP8 keys are stored with a wrong scale",
    cause="The scale of FP8 keys is near zero, and all keys become the largest number that fits.",
    row=QUANTIZED,
    issues=("vllm#50702", "trtllm#2699"),
    setup="fp8",
    broken=broken,
    traffic=together,
    default=Missed("what is stored is what was computed; whether the numbers are right is not looked at"),
)
