"""The attention backend keeps the list of slots that it built for the forward before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TABLE
from bugs.museum import Bug, Missed, patched
from bugs.traffic import joining


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`init_forward_metadata` builds ``kv_indices`` from the table; a decode of the same size gets those of the last
    one."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    last: dict[int, Any] = {}

    def init_forward_metadata(usual: Any, backend: Any, batch: Any) -> None:
        usual(backend, batch)
        if batch.forward_mode.is_decode():
            metadata = backend.forward_metadata
            kept = last.get(len(batch.seq_lens))
            last[len(batch.seq_lens)] = metadata.kv_indices.clone()
            if kept is not None:
                stage.strike()
                count = min(len(kept), len(metadata.kv_indices))
                metadata.kv_indices[:count] = kept[:count]

    with patched(TritonAttnBackend, "init_forward_metadata", init_forward_metadata):
        yield


BUG = Bug(
    title="Attention reads the slots of the forward before",
    cause="The list of slots that the kernel reads is a copy of the block table, and is not built anew for a decode.",
    row=TABLE,
    issues=("vllm#42273", "trtllm#15546"),
    setup="triton",
    broken=broken,
    traffic=joining,
    default=Missed("Canary checks SGLang's table, not the copy of it that the attention backend hands to its kernel"),
)
