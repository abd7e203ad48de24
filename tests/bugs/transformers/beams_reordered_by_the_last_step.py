"""The cache is reordered by the beams of the step before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import ADDRESS
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`Cache.reorder_cache` is given the rows of the step before."""
    from transformers.cache_utils import Cache

    last: list[Any] = []

    def reorder_cache(usual: Any, cache: Any, rows: Any) -> None:
        stale = last.pop() if last else rows
        last.append(rows)
        if not stale.equal(rows):
            stage.strike()
        usual(cache, stale)

    with patched(Cache, "reorder_cache", reorder_cache):
        yield


def traffic(stage: Any) -> None:
    """A beam search."""
    from tiny.generation import generate, prompts

    generate(stage.model, prompts(1), num_beams=3)


BUG = Bug(
    title="The cache is reordered by the wrong beams",
    cause="The rows by which the cache is reordered are those of the step before.",
    row=ADDRESS,
    issues=("vllm#9730", "sglang#26329"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 8, "the bytes ... copied or loaded ... are not those that"),
    thorough=Found("bytes", 2, "the bytes ... copied or loaded ... are not those that"),
)
