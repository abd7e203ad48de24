"""When beams change places, the cache moves keys, and values stay."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PARTIAL
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`reorder_cache` of a layer moves keys and values."""
    from transformers.cache_utils import CacheLayerMixin

    def reorder_cache(usual: Any, layer: Any, beams: Any) -> None:
        values = layer.values
        usual(layer, beams)
        if not layer.values.equal(values):
            stage.strike()
        layer.values = values

    with patched(CacheLayerMixin, "reorder_cache", reorder_cache):
        yield


def traffic(stage: Any) -> None:
    """A beam search."""
    from tiny.generation import generate, prompts

    generate(stage.model, prompts(1), num_beams=3)


BUG = Bug(
    title="Beams move their keys only",
    cause="When beams change places, values stay with the beam that had them before.",
    row=PARTIAL,
    issues=("transformers#48280", "sglang#38031"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 8, "the bytes ... copied or loaded ... are not those that"),
    thorough=Found("bytes", 2, "the bytes ... copied or loaded ... are not those that"),
)
