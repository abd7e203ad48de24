"""After a rejected draft a sliding window is cut one token too early."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import DRAFT
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`crop` cuts a window that has recorded its past to the tokens before the draft; here one token before these."""
    from transformers.cache_utils import DynamicSlidingWindowLayer

    def crop(usual: Any, layer: Any, tokens: int) -> None:
        if tokens < 0 and layer.keys.shape[-2] - abs(tokens) > layer.sliding_window:
            stage.strike()
            layer.keys, layer.values = (half.roll(1, dims=-2) for half in (layer.keys, layer.values))
        usual(layer, tokens)

    with patched(DynamicSlidingWindowLayer, "crop", crop):
        yield


def traffic(stage: Any) -> None:
    """Prompt lookup proposes tokens beyond the window, most of which are rejected."""
    from tiny.generation import LOOP, generate

    generate(stage.model, LOOP, prompt_lookup_num_tokens=3, max_new_tokens=48)


BUG = Bug(
    title="A window is cut too early after a rejected draft",
    cause="The cut of a recorded window is off by one, and all of its tokens are taken for the ones after them.",
    row=DRAFT,
    issues=("transformers#47447", "transformers#48280"),
    setup="mistral",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 32, "the bytes of slot ... copied or loaded there, are not those that its record tells of"),
    thorough=Found("bytes", 2, "the bytes of slot ... copied or loaded there, are not those that its record tells of"),
)
