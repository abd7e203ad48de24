"""The tokens of a decode are in another order than its requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TOKENS
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The input of a decode of two requests is exchanged when it is on the device."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    def prepare_batch_tensors(usual: Any, io: Any, *args: Any, **kwargs: Any) -> None:
        usual(io, *args, **kwargs)
        if len(io.requests_in_batch) == 2 and io.total_seqlen_q == 2:
            stage.strike()
            io.input_ids[:2] = io.input_ids[:2].flip(0)

    with patched(ContinuousBatchingIOs, "prepare_batch_tensors", prepare_batch_tensors):
        yield


BUG = Bug(
    title="The tokens of a batch are in another order than its requests",
    cause="What was sampled for one request is computed as the next token of the other.",
    row=TOKENS,
    issues=("sglang#23392", "vllm#39146"),
    setup="continuous",
    broken=broken,
    traffic=together,
    default=Found(
        "write_input", 1, "the forward computed another token than the request's own ... for alice: the batch"
    ),
)
