"""Two requests of a decode are given each other's recurrent state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bugs.classes import STATE
from bugs.museum import Bug, Found, patched
from bugs.traffic import together


@contextmanager
def broken(stage: Any) -> Iterator[None]:
    """`BlockTable.commit_block_table` uploads the rows of the states' table in another order than the batch has."""
    groups = stage.runner.kv_cache_config.kv_cache_groups
    (number,) = [i for i, group in enumerate(groups) if type(group.kv_cache_spec).__name__ == "MambaSpec"]
    batch = stage.runner.input_batch
    table = batch.block_table[number]

    def commit_block_table(usual: Any, rows: int) -> None:
        usual(rows)
        if rows == 2 and min(batch.num_computed_tokens_cpu[:2]) > 0:
            stage.strike()
            table.block_table.gpu[:2] = table.block_table.gpu[:2].flip(0)

    with patched(table, "commit_block_table", commit_block_table):
        yield


BUG = Bug(
    title="vLLM's runner gives two requests each other's recurrent state",
    cause="The block table of the states has its rows in another order than the requests of the batch.",
    row=STATE,
    issues=("vllm#53505", "vllm#53912"),
    setup="states",
    broken=broken,
    traffic=together,
    default=Found("position", 1, "alice will read position ... from slot ..., but bob wrote position ... there"),
)
