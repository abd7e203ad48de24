"""In a decode SGLang's own CPU attention reads up to the token before the new one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import LENGTH
from bugs.museum import Bug, Found, patched
from bugs.traffic import joining


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`_run_sdpa_forward_decode` of the torch_native backend, which slices each row's keys from the table by its
    length, gets lengths from before this token; where that leaves any."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def decode(usual: Any, *args: Any, **kwargs: Any) -> Any:
        stage.strike()
        given = list(args)
        # self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens
        given[7] = (given[7] - 1).clamp(min=1)
        return usual(*given, **kwargs)

    with patched(TorchNativeAttnBackend, "_run_sdpa_forward_decode", decode):
        yield


SENTENCE = "keys of TorchNativeAttnBackend has ... tokens for ..., and ... are right (1 too few)"

BUG = Bug(
    title="A decode leaves its own token out of what it reads",
    cause="The backend slices each row's keys from the table by a length that does not count the new token.",
    row=LENGTH,
    issues=("vllm#53919", "imp#986"),
    setup="mha",
    broken=broken,
    traffic=joining,
    default=Found("read_length", 16, SENTENCE),
    thorough=Found("read_length", 1, SENTENCE),
)
