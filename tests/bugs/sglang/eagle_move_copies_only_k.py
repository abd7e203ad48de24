"""When the accepted path of a draft tree is moved to its place, only K is copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import PARTIAL
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`move_kv_cache` copies K and V; here V stays where it was."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def move_kv_cache(usual: Any, pool: Any, target: Any, source: Any) -> None:
        kept = [v.clone() for v in pool.v_buffer]
        usual(pool, target, source)
        if not target.equal(source):
            stage.strike()
        for v, before in zip(pool.v_buffer, kept, strict=True):
            v.copy_(before)

    with patched(MHATokenToKVPool, "move_kv_cache", move_kv_cache):
        yield


BUG = Bug(
    title="EAGLE's move copies only K",
    cause="The accepted tokens of a draft tree are moved to their slots without their V.",
    row=PARTIAL,
    issues=("sglang#26329", "sglang#38031"),
    setup="eagle_tree",
    broken=broken,
    traffic=together,
    default=Found(
        "bytes", 1, "the bytes that were copied or loaded to slot ... of v. ... are not those that alice wrote"
    ),
)
