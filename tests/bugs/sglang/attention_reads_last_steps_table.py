"""The attention backend keeps the list of slots that it built for the forward before."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bugs.classes import TABLE
from bugs.museum import Bug, Found, patched
from bugs.traffic import joining


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`init_forward_metadata` builds ``kv_indices`` from the table; a decode of the same size gets those of the last
    one."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    last: dict[int, Any] = {}

    def init_forward_metadata(usual: Any, batch: Any) -> None:
        usual(batch)
        if batch.forward_mode.is_decode():
            metadata = usual.__self__.forward_metadata
            kept = last.get(len(batch.seq_lens))
            last[len(batch.seq_lens)] = metadata.kv_indices.clone()
            if kept is not None:
                stage.strike()
                count = min(len(kept), len(metadata.kv_indices))
                metadata.kv_indices[:count] = kept[:count]

    with ExitStack() as all_of_them:
        for backend in gc.get_objects():
            if isinstance(backend, TritonAttnBackend):
                all_of_them.enter_context(patched(backend, "init_forward_metadata", init_forward_metadata))
        yield


BUG = Bug(
    title="Attention reads the slots of the forward before",
    cause="The list of slots that the kernel reads is a copy of the block table, and is not built anew for a decode.",
    row=TABLE,
    issues=("vllm#42273", "trtllm#15546"),
    setup="triton",
    broken=broken,
    traffic=joining,
    default=Found("read_table", 16, "kv_indices of TritonAttnBackend names slot"),
)
