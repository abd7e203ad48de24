"""A decode is written to the slots of the step before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import TABLE
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`compute_slot_mapping` does not run for a decode of as many requests as before."""
    tables = stage.runner.input_batch.block_table
    last = [0]

    def compute_slot_mapping(usual: Any, rows: int, starts: Any, positions: Any) -> None:
        if last[0] == rows == len(positions) == 2:
            stage.strike()
            return
        last[0] = rows if rows == len(positions) else 0
        usual(rows, starts, positions)

    with patched(tables, "compute_slot_mapping", compute_slot_mapping):
        yield


BUG = Bug(
    title="The slot mapping is that of the step before",
    cause="The slots to write are computed after the forward that needs them, which uses those of the step before.",
    row=TABLE,
    issues=("vllm#42273", "trtllm#15546"),
    setup="llama",
    broken=broken,
    traffic=together,
    default=Found("write_slot", 1, "alice writes position ... to slot ..., but will read it from slot ..."),
)
