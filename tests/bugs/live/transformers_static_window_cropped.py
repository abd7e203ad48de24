"""Transformers' own ``StaticCache.crop``, of a window that is full."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """Nothing of the engine is replaced: more is fed than the window holds, and a rejected draft is cropped."""
    stage.prompt_tokens = 20
    yield


def traffic(stage: Any) -> None:
    """A prompt, a draft of three tokens, which is rejected and cropped, and four tokens more. Where the engine is sound
    all of it fits the window of 8."""
    from tiny.generation import forwards, new_cache, prompts

    tokens = getattr(stage, "prompt_tokens", 2)
    cache = new_cache(stage.model, "static")
    forwards(stage.model, cache, prompts(1, tokens), prompts(1, 3))
    if tokens > 8:
        stage.strike()
    cache.crop(-3)
    forwards(stage.model, cache, *prompts(1, 4).split(1, dim=1))


BUG = Bug(
    title="A static window cropped when it is full",
    cause="`StaticSlidingWindowLayer.crop` counts back; what the window had given up for the draft does not come back.",
    row=WINDOW,
    issues=("transformers#44893",),
    setup="mistral",
    broken=broken,
    traffic=traffic,
    default=Found(
        "position",
        1,
        "generate ... will read position 13 from slot 1 ..., but what was copied or loaded there is position 16",
    ),
    releases=">=5.24,<5.25",
)
