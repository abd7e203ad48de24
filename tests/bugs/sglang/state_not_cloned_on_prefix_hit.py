"""A request that continues a cached prefix gets a slot for its recurrent state, and the state isn't copied there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import STATE
from bugs.museum import Bug, Found, patched
from bugs.traffic import asked_again


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`MambaPool.copy_from` does nothing."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    def copy_from(usual: Any, pool: Any, source: Any, destination: Any) -> None:
        stage.strike()

    with patched(MambaPool, "copy_from", copy_from):
        yield


BUG = Bug(
    title="A recurrent state is not cloned on a prefix hit",
    cause="The copy of the cached state into the request's own slot never runs, and it goes on from what lay there.",
    row=STATE,
    issues=("vllm#53505", "vllm#53912"),
    setup="mamba2",
    slow=True,
    broken=broken,
    traffic=asked_again,
    default=Found(
        "bytes",
        8,
        "the bytes of slot ... which were copied or loaded there, are not those that ... alice",
    ),
)
