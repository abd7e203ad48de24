"""A static cache writes a token to the place of the one before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import ADDRESS
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The place is computed before the length is counted up; in layer 1 it is one behind."""
    from transformers.cache_utils import StaticLayer

    def update(usual: Any, layer: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if keys.shape[-2] == 1 and layer in stage.victims:
            stage.strike()
            layer.cumulative_length.sub_(1)
            result = usual(layer, keys, values, *args, **kwargs)
            layer.cumulative_length.add_(1)
            return result
        return usual(layer, keys, values, *args, **kwargs)

    with patched(StaticLayer, "update", update):
        yield


def traffic(stage: Any) -> None:
    """`generate()` with a static cache."""
    from tiny.generation import generate, new_cache, prompts

    cache = new_cache(stage.model, "static")
    stage.victims = [cache.layers[1]]
    generate(stage.model, prompts(1), cache=cache)


BUG = Bug(
    title="A static cache writes one place behind",
    cause="The place of the new token is that of the one before, which is overwritten.",
    row=ADDRESS,
    issues=("vllm#54498", "sglang#26329"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("lost_write", 1, "should have written a token ... of k.1, whose bytes are what they were before"),
)
