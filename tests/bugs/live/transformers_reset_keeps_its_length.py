"""Transformers' own ``DynamicCache.reset``, after which the cache still has its length."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import ZEROING
from bugs.museum import Bug, Found


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: the cache is used again after `reset`, as `reset` is for."""
    stage.reuse = True
    yield


def traffic(stage: Any) -> None:
    """Two prompts, one after the other: where the engine is sound each with a cache of its own."""
    from tiny.generation import forwards, new_cache, prompts

    cache = new_cache(stage.model, "dynamic")
    forwards(stage.model, cache, prompts(1, 11))
    if getattr(stage, "reuse", False):
        cache.reset()
        stage.strike()
    else:
        cache = new_cache(stage.model, "dynamic")
    forwards(stage.model, cache, prompts(1, 7))


BUG = Bug(
    title="A reset cache keeps its length",
    cause="`reset` fills a growing cache with zeros in place of dropping them, so the next prompt comes after them.",
    row=ZEROING,
    issues=("transformers#48809", "transformers#48509"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("unwritten", 1, "generate ... will read position 0 from slot ..."),
    releases=">=5.17,<5.18",
)
