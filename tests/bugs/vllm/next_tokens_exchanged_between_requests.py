"""Each of two requests of a decode gets the token that was sampled for the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TOKENS
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`_prepare_input_ids` gathers the last tokens of the batch in another order."""

    def _prepare_input_ids(usual: Any, output: Any, *args: Any, **kwargs: Any) -> None:
        usual(output, *args, **kwargs)
        if len(stage.runner.input_batch.req_ids) == output.total_num_scheduled_tokens == 2:
            ids = stage.runner.input_ids.gpu
            stage.strike()
            ids[:2] = ids[:2].flip(0)

    with patched(stage.runner, "_prepare_input_ids", _prepare_input_ids):
        yield


BUG = Bug(
    title="vLLM's runner exchanges the next tokens of two requests",
    cause="The tokens that were sampled are gathered in another order than the requests have.",
    row=TOKENS,
    issues=("vllm#39146", "vllm#38606", "vllm#13408"),
    setup="llama",
    broken=broken,
    traffic=together,
    default=Found("write_input", 1, "the sampler gave alice a token for position ..., but the forward computed"),
)
