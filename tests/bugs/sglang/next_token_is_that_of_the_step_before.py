"""A decode computes the token of the step before once more."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TOKENS
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The relay of sampled tokens to the next forward is read before it is written."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    last: list[Any] = []

    def forward_batch_generation(usual: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch is not None and batch.forward_mode.is_decode() and len(batch.reqs) == 2:
            right = batch.input_ids.clone()
            if last:
                stage.strike()
                batch.input_ids = last.pop()
            last.append(right)
        return usual(worker, batch, *args, **kwargs)

    with patched(TpModelWorker, "forward_batch_generation", forward_batch_generation):
        yield


BUG = Bug(
    title="A decode computes the last step's token again",
    cause="The next forward reads the sampled token before the sampler has written it, and gets the one before.",
    row=TOKENS,
    issues=("sglang#22819", "vllm#38606", "vllm#13408"),
    setup="mha",
    broken=broken,
    traffic=together,
    default=Found("write_input", 1, "the sampler gave alice a token for position ..., but the forward computed"),
)
