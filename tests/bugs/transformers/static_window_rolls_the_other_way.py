"""A static sliding window moves its tokens in the wrong direction before it takes in the new one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`update` of a full window moves all tokens one place to the front; here to the back, in one layer."""
    from transformers.cache_utils import StaticSlidingWindowLayer

    def update(usual: Any, layer: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if layer in stage.victims and layer.cumulative_length_int >= layer.max_cache_len:
            stage.strike()
            for half in (layer.keys, layer.values):
                half.copy_(half.roll(2, dims=-2))
        return usual(layer, keys, values, *args, **kwargs)

    with patched(StaticSlidingWindowLayer, "update", update):
        yield


def traffic(stage: Any) -> None:
    """`generate()` with a static cache, beyond the window."""
    from tiny.generation import generate, new_cache, prompts

    cache = new_cache(stage.model, "static")
    stage.victims = [cache.layers[1]]
    generate(stage.model, prompts(1), cache=cache)


BUG = Bug(
    title="A static window rolls the other way",
    cause="Tokens move to the back, so the new token takes the place of one that is still read.",
    row=WINDOW,
    issues=("transformers#37574",),
    setup="mistral",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 8, "the bytes ... copied or loaded ... are not those that"),
    thorough=Found("bytes", 2, "the bytes ... copied or loaded ... are not those that"),
)
