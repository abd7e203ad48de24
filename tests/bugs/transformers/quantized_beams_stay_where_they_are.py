"""When beams change places, a quantized cache moves nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import QUANTIZED
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`reorder_cache` of a quantized layer looks at the part that is not quantized, which is empty."""
    from transformers.cache_utils import Fp8QuantizedLayer

    def reorder_cache(usual: Any, layer: Any, beams: Any) -> None:
        if beams.tolist() != sorted(beams.tolist()) or len({*beams.tolist()}) < len(beams):
            stage.strike()

    with patched(Fp8QuantizedLayer, "reorder_cache", reorder_cache):
        yield


def traffic(stage: Any) -> None:
    """A beam search with an FP8 cache."""
    from tiny.generation import generate, prompts

    quantized = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    generate(stage.model, prompts(1), num_beams=3, **quantized)


BUG = Bug(
    title="Beams of a quantized cache stay where they are",
    cause="Only the part of the cache that is not quantized yet changes places with the beams.",
    row=QUANTIZED,
    issues=("transformers#48700", "transformers#45510"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 8, "the bytes of slot ... copied or loaded there, are not those that its record tells of"),
    thorough=Found("bytes", 4, "the bytes of slot ... copied or loaded there, are not those that its record tells of"),
)
