"""A later chunk of a prompt is computed with the length of a first one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LENGTH
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`_run_sdpa_forward_extend` of the torch_native backend gets no prefix, and a chunk's own tokens as the length of
    its row."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def extend(usual: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        # self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, prefixes, new ones
        if bool((given[8] > 0).any()):
            stage.strike()
            given[7], given[8] = given[9].to(given[7].dtype), given[8] * 0
        return usual(*given, **kwargs)

    with patched(TorchNativeAttnBackend, "_run_sdpa_forward_extend", extend):
        yield


def traffic(stage: Any) -> None:
    """Prompts of two chunks, one after the other."""
    for number in range(24):
        stage.submit(f"p{number}", stage.tokens(f"p{number}", 90), 2)
        finish(stage)


SENTENCE = "keys of TorchNativeAttnBackend has ... tokens for ..., and ... are right (... too few)"

BUG = Bug(
    title="A later chunk is computed as if it were the first",
    cause="The backend gets a chunk's own tokens as the row's length, so that the prompt before it is not read.",
    row=LENGTH,
    issues=("imp#986",),
    setup="mha",
    broken=broken,
    traffic=traffic,
    default=Found("read_length", 48, SENTENCE),
    thorough=Found("read_length", 1, SENTENCE),
)
