"""Of a recurrent state, the convolution's part is left out of the copy on a prefix hit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PARTIAL
from bugs.museum import Bug, Found, patched
from bugs.traffic import asked_again


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`MambaPool.copy_from` copies both parts; here the destination keeps its old convolution."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    def copy_from(usual: Any, pool: Any, source: Any, destination: Any) -> None:
        stage.strike()
        kept = [conv[:, destination].clone() for conv in pool.mamba_cache.conv]
        usual(pool, source, destination)
        for conv, before in zip(pool.mamba_cache.conv, kept, strict=True):
            conv[:, destination] = before

    with patched(MambaPool, "copy_from", copy_from):
        yield


BUG = Bug(
    title="Half of a recurrent state is cloned",
    cause="The convolution window of a cached state is not copied with the rest of the state.",
    row=PARTIAL,
    issues=("sglang#38031", "imp#1189", "vllm#53912"),
    setup="mamba2",
    slow=True,
    broken=broken,
    traffic=asked_again,
    default=Found(
        "bytes",
        8,
        "the bytes of slot ... of conv.0, which were copied or loaded there, are not those that ... alice",
    ),
)
