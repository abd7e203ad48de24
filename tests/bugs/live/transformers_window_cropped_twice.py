"""Transformers' own ``DynamicCache.crop``, twice after one forward, of a window that has recorded its past."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: ``crop(0)`` comes before the draft is cropped."""
    stage.twice = True
    yield


def traffic(stage: Any) -> None:
    """A prompt of nine tokens, of which four are cropped; then one token. The window is 8."""
    import torch
    from tiny.generation import forwards, new_cache, prompts

    cache = new_cache(stage.model, "dynamic")
    cache.activate_past_recording()
    forwards(stage.model, cache, prompts(1, 9))
    if getattr(stage, "twice", False):
        cache.crop(0)
        stage.strike()
    cache.crop(-4)
    forwards(stage.model, cache, torch.tensor([[5]]))


BUG = Bug(
    title="A recorded window cropped twice after one forward",
    cause="`crop` cuts a recorded window to its size, and the next one counts back below what is left, in silence.",
    row=WINDOW,
    issues=("transformers#47447",),
    setup="mistral",
    broken=broken,
    traffic=traffic,
    default=Found("null_slot", 1, "generate ... uses a negative slot number for position 0: ..."),
    releases=">=5.17,<5.25",
)
