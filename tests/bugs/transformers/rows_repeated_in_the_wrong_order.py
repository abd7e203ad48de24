"""The cache of a prompt is repeated for several answers in another order than the prompts are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LAYOUT
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`batch_repeat_interleave` makes rows 0 0 1 1; here they become 0 1 0 1."""
    from transformers.cache_utils import DynamicLayer

    def batch_repeat_interleave(usual: Any, layer: Any, repeats: int) -> None:
        stage.strike()
        layer.keys = layer.keys.repeat(repeats, 1, 1, 1)
        layer.values = layer.values.repeat(repeats, 1, 1, 1)

    with patched(DynamicLayer, "batch_repeat_interleave", batch_repeat_interleave):
        yield


def traffic(stage: Any) -> None:
    """Two prompts are read once, and each is continued twice."""
    import torch
    from tiny.generation import forwards, generate, new_cache, prompts

    asked = prompts(2)
    cache = new_cache(stage.model, "dynamic")
    forwards(stage.model, cache, asked)
    cache.batch_repeat_interleave(2)
    more = asked.repeat_interleave(2, dim=0)
    generate(stage.model, torch.cat([more, more[:, :3]], dim=1), cache=cache)


BUG = Bug(
    title="The rows of a cache are repeated in the wrong order",
    cause="Repeating rows one by one is taken for repeating the whole batch, so that rows get each other's prompt.",
    row=LAYOUT,
    issues=("LMCache#4463", "kvcached#424"),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found(
        "bytes", 8, "the bytes of slot ... changed since generate ... wrote them ...: a stray write, a race, a bad copy"
    ),
    thorough=Found(
        "bytes", 1, "the bytes of slot ... changed since generate ... wrote them ...: a stray write, a race, a bad copy"
    ),
)
