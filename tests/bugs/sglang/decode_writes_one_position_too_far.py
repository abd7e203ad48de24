"""A decode's slot is written to the table one position too far."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import ADDRESS
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`alloc_for_decode` writes the new slots at the requests' lengths; here, of those longer than 30, at the next
    position."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    def write(usual: Any, pool: Any, indices: Any, values: Any) -> None:
        rows, where = indices
        if not isinstance(where, slice) and bool((where > 34).any()):
            stage.strike()
            where = where + (where > 34)
        usual(pool, (rows, where), values)

    with patched(ReqToTokenPool, "write", write):
        yield


BUG = Bug(
    title="The table is written one position too far",
    cause="The position at which the new slot is entered into the block table is off by one for long requests.",
    row=ADDRESS,
    issues=("vllm#54498", "vllm#9730", "sglang#26329"),
    setup="mha",
    broken=broken,
    traffic=together,
    default=Found("write_slot", 1, "bob writes position 35 to slot ... but will read it from slot ..."),
)
