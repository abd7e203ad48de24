"""The list of slots is right, and where its rows end is a token short."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LENGTH
from bugs.museum import Bug, Found, patched
from bugs.traffic import joining


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`_fill_kv_indptr_and_indices` of the Triton backend: the last row's end in ``kv_indptr`` is one too low, if the
    row has two or more."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    def fill(usual: Any, *args: Any, **kwargs: Any) -> Any:
        indptr = usual(*args, **kwargs)
        if int(indptr[-1] - indptr[-2]) > 1:
            stage.strike()
            indptr[-1] -= 1
        return indptr

    with patched(TritonAttnBackend, "_fill_kv_indptr_and_indices", fill):
        yield


SENTENCE = "kv_indptr of TritonAttnBackend has ... tokens for ..., and ... are right (1 too few)"

BUG = Bug(
    title="The last row of a list of slots ends one token early",
    cause="Where the rows of the list end was computed from lengths that leave out the newest token of a row.",
    row=LENGTH,
    issues=("vllm#53919", "vllm#55227"),
    setup="triton",
    broken=broken,
    traffic=joining,
    default=Found("read_length", 16, SENTENCE),
    thorough=Found("read_length", 1, SENTENCE),
)
