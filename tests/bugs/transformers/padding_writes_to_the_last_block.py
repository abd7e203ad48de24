"""Padding writes to the last slot of the cache, not to the block that is kept for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PADDING
from bugs.museum import Bug, Found, patched
from bugs.traffic import joining


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The write list is filled up with slot -1, which wraps around to the last one."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    def _reset_read_and_write_indices(usual: Any, io: Any, q_len: int, kv_len: int) -> None:
        usual(io, q_len, kv_len)
        stage.strike()
        last = stage.cache.cache_allocators["full_attention"]._kv_token_views[0][0].shape[0] - 1
        io.write_index_storage[:, :] = last - last % stage.allocator.block_physical_stride

    with patched(ContinuousBatchingIOs, "_reset_read_and_write_indices", _reset_read_and_write_indices):
        yield


BUG = Bug(
    title="Padding writes to the last block",
    cause="The slot of padded tokens is -1, and that is the last block of the pool.",
    row=PADDING,
    issues=("vllm#43869", "vllm#57156"),
    setup="continuous",
    broken=broken,
    traffic=joining,
    default=Found("bytes", 12, "the bytes of slot 264 ... changed since clean-alice wrote them ...: a stray write"),
)
