"""A later chunk of a prompt is computed with the length of a first one, without its context."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bugs.classes import LENGTH
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The metadata builder gives a chunk its own tokens as ``seq_lens``, whatever was computed before."""
    import torch

    def build(usual: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = usual(common_prefix_len, common_attn_metadata, fast_build)
        new = metadata.query_start_loc.diff()[: len(metadata.seq_lens)]
        lengths = torch.where(new > 1, new, metadata.seq_lens[: len(new)])
        if not torch.equal(lengths, metadata.seq_lens[: len(new)]):
            stage.strike()
            metadata.seq_lens = lengths
        return metadata

    with ExitStack() as all_of_them:
        for groups in stage.runner.attn_groups:
            for group in groups:
                all_of_them.enter_context(patched(group.get_metadata_builder(), "build", build))
        yield


def traffic(stage: Any) -> None:
    """Prompts of two and three chunks, one after the other."""
    for number in range(20):
        stage.submit(f"p{number}", stage.tokens(f"p{number}", (100, 150)[number % 2]), 2)
        finish(stage)


SENTENCE = "seq_lens of CPUAttentionMetadata has ... tokens for ..., and ... are right (... too few)"

BUG = Bug(
    title="A later chunk gets the first chunk's length",
    cause="The length of a chunk is that of its own tokens: what was computed before is not read.",
    row=LENGTH,
    issues=("imp#986",),
    setup="llama",
    broken=broken,
    traffic=traffic,
    default=Found("read_length", 64, SENTENCE),
    thorough=Found("read_length", 1, SENTENCE),
)
