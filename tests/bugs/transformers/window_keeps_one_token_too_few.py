"""A sliding window drops one token more than attention can do without."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import WINDOW
from bugs.museum import Bug, Found, patched


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`DynamicSlidingWindowLayer.update` keeps the last ``sliding_window - 1`` tokens; here the oldest is a copy of the
    next one."""
    from transformers.cache_utils import DynamicSlidingWindowLayer

    def update(usual: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        result = usual(layer, *args, **kwargs)
        if layer.get_seq_length() > layer.sliding_window:
            stage.strike()
            import torch

            layer.keys = torch.cat([layer.keys[:, :, 1:2], layer.keys[:, :, 1:]], dim=2)
            layer.values = torch.cat([layer.values[:, :, 1:2], layer.values[:, :, 1:]], dim=2)
        return result

    with patched(DynamicSlidingWindowLayer, "update", update):
        yield


def traffic(stage: Any) -> None:
    """`generate()` beyond the window."""
    from tiny.generation import generate, prompts

    generate(stage.model, prompts(1))


BUG = Bug(
    title="A window drops a token that is still read",
    cause="The window is cut one token too short, and the place is filled with another token's KV.",
    row=WINDOW,
    issues=("sglang#34870", "sglang#27789"),
    setup="mistral",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 8, "the bytes ... copied or loaded ... are not those that"),
    thorough=Found("bytes", 4, "the bytes ... copied or loaded ... are not those that"),
)
