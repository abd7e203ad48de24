"""Each of two requests of a decode gets the token that was sampled for the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TOKENS
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The inputs of a decode are gathered in another order than the batch has."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    def forward_batch_generation(usual: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch is not None and batch.forward_mode.is_decode() and len(batch.reqs) == 2:
            stage.strike()
            batch.input_ids = batch.input_ids.flip(0)
        return usual(worker, batch, *args, **kwargs)

    with patched(TpModelWorker, "forward_batch_generation", forward_batch_generation):
        yield


BUG = Bug(
    title="Two requests get each other's next token",
    cause="The tokens that were sampled are fed to the next forward in another order than the requests have.",
    row=TOKENS,
    issues=("sglang#22819", "sglang#23392", "vllm#39146"),
    setup="mha",
    broken=broken,
    traffic=together,
    default=Found("write_input", 1, "the sampler gave alice a token for position ..., but the forward computed"),
)
