"""A cache is reset between two inputs, and its cross-attention half stays as it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PHANTOM
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`EncoderDecoderCache.reset` resets both halves, and marks the layers of the second one as to be filled."""
    from transformers.cache_utils import EncoderDecoderCache

    def reset(usual: Any, cache: Any) -> None:
        cache.self_attention_cache.reset()
        stage.strike()

    with patched(EncoderDecoderCache, "reset", reset):
        yield


def traffic(stage: Any) -> None:
    """`generate()` of two inputs, with the same cache."""
    from tiny.generation import CACHE, generate, prompts
    from tiny.models import STATES
    from transformers.cache_utils import EncoderDecoderCache, StaticCache

    config = stage.model.config
    cache = EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=most) for most in (40, STATES)))
    settings = {"decoder_start_token_id": 1, "bos_token_id": 1, "min_new_tokens": 6, CACHE: cache}
    generate(stage.model, prompts(), **settings)
    cache.reset()
    generate(stage.model, prompts() + 1, **settings)


BUG = Bug(
    title="Cross-attention goes on with the input before",
    cause="A reset leaves the half of the cache with K and V of the encoder's states, whose layers count as filled.",
    row=PHANTOM,
    issues=("transformers#31166",),
    setup="bart",
    broken=broken,
    traffic=traffic,
    default=Found(
        "prefix", 1, "computed ... of the encoder's states ... cross-attention reads K and V of another input"
    ),
)
