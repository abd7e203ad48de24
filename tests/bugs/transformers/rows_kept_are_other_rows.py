"""Of the rows of a cache, others are kept than those that go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import ADDRESS
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`batch_select_indices` of a layer keeps the rows before the ones that it is given."""
    from transformers.cache_utils import DynamicLayer

    def batch_select_indices(usual: Any, layer: Any, rows: Any) -> None:
        stage.strike()
        usual(layer, rows - 1)

    with patched(DynamicLayer, "batch_select_indices", batch_select_indices):
        yield


def traffic(stage: Any) -> None:
    """Four rows, of which two go on."""
    import torch
    from tiny.generation import forwards, new_cache, prompts

    cache = new_cache(stage.model, "dynamic")
    forwards(stage.model, cache, prompts(4, 11))
    cache.batch_select_indices(torch.tensor([1, 3]))
    forwards(stage.model, cache, *prompts(2, 9).split(1, dim=1))


BUG = Bug(
    title="Other rows are kept than those that go on",
    cause="The rows that a cache keeps are one off, so each sequence goes on with its neighbour's KV.",
    row=ADDRESS,
    issues=("transformers#45510", "vllm#9730"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 8, "the bytes of slot ... changed since generate ... wrote them"),
    thorough=Found("bytes", 2, "the bytes of slot ... changed since generate ... wrote them"),
)
