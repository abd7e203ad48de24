"""The mask of a decode hides the last token before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LENGTH
from bugs.museum import Bug, Missed, patched
from bugs.traffic import together

LENGTHS = ("cumulative_seqlens_q", "cumulative_seqlens_k")


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`build_attention_mask` lets a token see itself and all before it; here a decode does not see the last one."""
    from transformers.generation.continuous_batching import input_outputs

    def build_attention_mask(usual: Any, **given: Any) -> None:
        usual(**given)
        mask, queries, keys = (given[name] for name in ("attention_mask", *LENGTHS))
        for row in range(len(queries) - 1):
            if queries[row + 1] - queries[row] == 1 and keys[row + 1] - keys[row] > 1:
                stage.strike()
                mask[..., queries[row], keys[row + 1] - 2] = mask.min()

    with patched(input_outputs, "build_attention_mask", build_attention_mask):
        yield


BUG = Bug(
    title="The mask of a decode hides a token",
    cause="Slots and lengths are right, and the mask that attention adds to its scores leaves a token out.",
    row=LENGTH,
    issues=("transformers#41184",),
    setup="continuous",
    broken=broken,
    traffic=together,
    default=Missed("masks are not looked at: what attention is given to read is right, and it weighs a token with 0"),
)
