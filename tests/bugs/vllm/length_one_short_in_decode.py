"""In a decode attention is given the lengths from before the new token."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bugs.classes import LENGTH
from bugs.museum import Bug, Found, patched
from bugs.traffic import joining


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The metadata builder of every group leaves the new token out of ``seq_lens`` where each row has one."""

    def build(usual: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = usual(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.max_query_len == 1:
            stage.strike()
            metadata.seq_lens = metadata.seq_lens - 1
        return metadata

    with ExitStack() as all_of_them:
        for groups in stage.runner.attn_groups:
            for group in groups:
                all_of_them.enter_context(patched(group.get_metadata_builder(), "build", build))
        yield


SENTENCE = "seq_lens of CPUAttentionMetadata has ... tokens for ..., and ... are right (1 too few)"

BUG = Bug(
    title="Attention reads one token too few in decode",
    cause="The lengths that the kernel reads by were taken before the token of this step was counted.",
    row=LENGTH,
    issues=("vllm#53919", "vllm#55227"),
    setup="llama",
    broken=broken,
    traffic=joining,
    default=Found("read_length", 16, SENTENCE),
    thorough=Found("read_length", 1, SENTENCE),
)
