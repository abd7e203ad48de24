"""A static cache keeps its length when a draft is rejected."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import DRAFT
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`StaticLayer.crop` counts back; here it counts back one token fewer."""
    from transformers.cache_utils import StaticLayer

    def crop(usual: Any, layer: Any, tokens: int) -> None:
        stage.strike()
        usual(layer, tokens + 1)

    with patched(StaticLayer, "crop", crop):
        yield


def traffic(stage: Any) -> None:
    """A prompt, a draft of three tokens, which is rejected, and four tokens more."""
    from tiny.generation import forwards, new_cache, prompts

    cache = new_cache(stage.model, "static")
    forwards(stage.model, cache, prompts(1, 11), prompts(1, 3))
    cache.crop(-3)
    forwards(stage.model, cache, *prompts(1, 4).split(1, dim=1))


BUG = Bug(
    title="A static cache is rolled back one token too little",
    cause="The count of a static cache keeps a rejected token, so the next one is stored behind it.",
    row=DRAFT,
    issues=("transformers#45745", "transformers#30312"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("unwritten", 1, "generate ... will read position 11 from slot 11 ... which holds nothing since"),
)
