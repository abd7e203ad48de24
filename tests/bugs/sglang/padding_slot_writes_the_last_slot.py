"""Rows of padding have slot -1, and the store takes it for the last one of the pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PADDING
from bugs.museum import Bug, Found, patched
from bugs.traffic import finish


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """The store of two or three tokens gets one more, as a batch is filled up to four rows."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def _store_kv_layer(usual: Any, pool: Any, layer: int, loc: Any, k: Any, v: Any) -> None:
        usual(pool, layer, loc, k, v)
        if len(loc) in (2, 3):
            stage.strike()
            padding = torch.tensor([-1])
            pool.k_buffer[layer][padding] = k[:1].flip(-1)
            pool.v_buffer[layer][padding] = v[:1].flip(-1)

    with patched(MHATokenToKVPool, "_store_kv_layer", _store_kv_layer):
        yield


def traffic(stage: Any) -> None:
    """Three requests decode; when Alice has ended, Bob or Carol gets the last slot of the pool."""
    stage.scheduler.flush_cache()
    for name, tokens, new_tokens in (("alice", 30, 5), ("bob", 25, 30), ("carol", 20, 30)):
        stage.submit(name, stage.tokens(name, tokens), new_tokens)
    finish(stage)


BUG = Bug(
    title="Padding writes to the last slot of the pool",
    cause="The slot of a padded row is -1, which the store takes for the last slot, and that is somebody's.",
    row=PADDING,
    issues=("vllm#43869", "vllm#57156"),
    setup="small",
    broken=broken,
    traffic=traffic,
    default=Found("bytes", 30, "the bytes of slot 112 ... changed since ... wrote them ...: a stray write"),
)
