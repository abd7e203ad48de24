"""After a rejection all layers roll back but one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import DRAFT
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The crop of the last layer gets one token fewer than the others."""
    from transformers.cache_utils import DynamicLayer

    def crop(usual: Any, layer: Any, tokens: int) -> None:
        last = any(cache.layers[-1] is layer for cache in stage.caches)
        if last and tokens < -1:
            stage.strike()
            layer.keys = layer.keys.roll(1, dims=-2)
        usual(layer, tokens)

    from transformers.cache_utils import Cache

    stage.caches = []

    def crop_all(usual: Any, cache: Any, tokens: int) -> None:
        stage.caches = [cache]
        usual(cache, tokens)

    with patched(DynamicLayer, "crop", crop), patched(Cache, "crop", crop_all):
        yield


def traffic(stage: Any) -> None:
    """Prompt lookup proposes tokens, most of which are rejected."""
    from tiny.generation import LOOP, generate

    generate(stage.model, LOOP, prompt_lookup_num_tokens=3)


BUG = Bug(
    title="One layer rolls back from the wrong end",
    cause="Rows of one layer are shifted by one when rejected drafts are taken back.",
    row=DRAFT,
    issues=("mlx-vlm#1155", "transformers#48280"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 8, "the bytes of slot ... of k.2 changed since generate ... wrote them ...: a stray write"),
    thorough=Found("bytes", 2, "the bytes of slot ... of k.2 changed since generate ... wrote them ...: a stray write"),
)
