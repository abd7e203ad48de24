"""A compiled forward leaves out the store of one layer's V."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TABLE
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`StaticLayer.update` writes K and V in place; a graph that was captured with another cache writes V to that
    one."""
    from transformers.cache_utils import StaticLayer

    def update(usual: Any, layer: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if keys.shape[-2] == 1 and layer in stage.victims:
            stage.strike()
            kept = layer.values.clone()
            result = usual(layer, keys, values, *args, **kwargs)
            layer.values.copy_(kept)
            return result
        return usual(layer, keys, values, *args, **kwargs)

    with patched(StaticLayer, "update", update):
        yield


def traffic(stage: Any) -> None:
    """`generate()` with a static cache."""
    from tiny.generation import generate, new_cache, prompts

    cache = new_cache(stage.model, "static")
    stage.victims = [cache.layers[2]]
    generate(stage.model, prompts(1), cache=cache)


BUG = Bug(
    title="A captured graph writes to another cache",
    cause="A graph that was captured with another cache has that one's address, and this one's V is never written.",
    row=TABLE,
    issues=("trtllm#15546", "vllm#42273"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("lost_write", 1, "should have written a token ... of v.2, whose bytes are what they were before"),
)
