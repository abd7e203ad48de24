"""The tables and lengths that vLLM's attention is given, against the blocks that its scheduler sent and the lengths of
the forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_on_cpu import guarded
from vllm_on_cpu.engine import BLOCK, SmallEngine

from canary_core import Kind, Patches

pytestmark = pytest.mark.timeout(900)

STEPS = 3
"""Tokens that a request has answered before something breaks."""


def test_clean_traffic_compares_tables_of_every_group_and_finds_nothing(engine):
    """Prefix hits, chunks, eviction and preemption: block tables and slot mappings of all groups have their turns, each
    with lengths."""
    with guarded.guard(engine.small, table_interval=1, read_check=0) as guard:
        guarded.traffic(engine.small, 2)
        assert guard.trouble() == []
        told = {name.split(" of ")[0] for name in guard.canary.step.tables.names}
        stats = guard.canary.stats()
        assert guard.findings.told("tables_left_out") == []
    lengths = {"seq_lens", "query_start_loc"} | ({"context_lens"} if engine.setup.model == "deepseek" else set())
    assert told == {"block_table", "slot_mapping"} | lengths
    assert stats["tables_compared"] == stats["lengths_compared"] == stats["forwards"] > 20
    assert "tables_skipped" not in stats


def built(engine: SmallEngine, change: Callable[[Any], None]) -> Patches:
    """From now on ``change`` gets the metadata of each forward, after vLLM's own builder made them."""
    patches = Patches()
    for groups in engine.runner.attn_groups:
        for group in groups:

            def make(original: Callable[..., Any]) -> Callable[..., Any]:
                def build(*args: Any, **kwargs: Any) -> Any:
                    metadata = original(*args, **kwargs)
                    change(metadata)
                    return metadata

                return build

            patches.wrap(group.get_metadata_builder(), "build", make)
    return patches


def begin(engine: SmallEngine, count: int = 2) -> list[str]:
    """So many requests of two blocks each, the second nearly full, that have answered a few tokens."""
    names = [f"r{i}" for i in range(count)]
    for i, name in enumerate(names):
        engine.submit(name, [7 + i] * (2 * BLOCK - 6), 16)
    while any(len(engine.answers[name]) < STEPS for name in names):
        engine.step()
    return names


def finish(engine: SmallEngine) -> None:
    """Serves what is left."""
    while engine.step():
        pass


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_stale_entry_in_the_metadata_is_told(engine):
    """The runner's own table is right; attention was given a copy with one block of another request."""
    with guarded.guard(engine.small, table_interval=1, read_check=0, lifetime=False) as guard:
        begin(engine.small)
        runner = engine.small.runner
        rows = runner.input_batch.req_ids
        row = rows.index("r1")
        wrong, right = engine.small.blocks("r0")[0][0], engine.small.blocks("r1")[0][0]

        def stale(metadata: Any) -> None:
            if runner.input_batch.num_reqs == 2:
                metadata.block_table = metadata.block_table.clone()
                metadata.block_table[row, 0] = wrong

        patches = built(engine.small, stale)
        engine.small.step()
        engine.small.step()
        patches.undo()
        finish(engine.small)
        guard.canary.drain()
        found = [v for v in guard.findings.violations if v.kind is Kind.READ_TABLE]
        others = {v.kind for v in guard.findings.violations} - {Kind.READ_TABLE}
        first = guard.findings.violations[0]
    assert {(v.request, v.position) for v in found} == {("r1", position) for position in range(BLOCK)}
    assert all((v.slot, v.stored_value) == (wrong * BLOCK + v.position, right * BLOCK + v.position) for v in found)
    assert all(v.detail == "block_table of CPUAttentionMetadata" and v.stored_request == "r0" for v in found)
    # What was computed with another request's KV has other bytes; nothing else of the engine is wrong.
    assert first.kind is Kind.READ_TABLE
    assert others == set()


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_block_that_was_lost_on_its_way_to_the_runner_is_told(engine):
    """The runner notes another block than the scheduler sent. All that it has agrees: it stores and reads there."""
    with guarded.guard(engine.small, table_interval=1, read_check=0, lifetime=False) as guard:
        begin(engine.small)
        tables = engine.small.runner.input_batch.block_table
        held = {block for name in ("r0", "r1") for block in engine.small.blocks(name)[0]}
        wrong = max(set(range(1, 24)) - held)
        original = tables.append_row
        sent = []

        def other(blocks: tuple[list[int], ...], row: int) -> None:
            if engine.small.runner.input_batch.req_ids[row] == "r1" and not sent:
                sent.extend(blocks[0])
                blocks = ([wrong],)
            original(blocks, row)

        tables.append_row = other
        try:
            engine.small.submit("r1-long", [3] * 5, 2)
            for _ in range(BLOCK):
                engine.small.step()
        finally:
            del tables.append_row
        finish(engine.small)
        guard.canary.drain()
        found = [v for v in guard.findings.violations if v.kind is Kind.READ_TABLE]
    assert len(sent) == 1
    assert {v.request for v in found} == {"r1"}
    assert {v.detail for v in found} == {f"{name} of CPUAttentionMetadata" for name in ("block_table", "slot_mapping")}
    assert all(v.slot - wrong * BLOCK == v.stored_value - sent[0] * BLOCK == v.position % BLOCK for v in found)


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_stale_slot_mapping_is_told(engine):
    """The layers are given the slots of the step before; the runner's own list is right."""
    with guarded.guard(engine.small, table_interval=1, read_check=0, lifetime=False) as guard:
        begin(engine.small)
        runner = engine.small.runner
        patches, kept = Patches(), []

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def stale(*args: Any, **kwargs: Any) -> Any:
                by_group, by_layer = original(*args, **kwargs)
                right = next(iter(by_layer.values()))
                given = kept[-1] if kept else right.clone()
                kept.append(right.clone())
                return by_group, dict.fromkeys(by_layer, given)

            return stale

        patches.wrap(runner, "_get_slot_mappings", make)
        for _ in range(4):
            engine.small.step()
        patches.undo()
        finish(engine.small)
        guard.canary.drain()
        found = [v for v in guard.findings.violations if v.kind is Kind.READ_TABLE]
        roots = {incident.root.kind for incident in guard.canary.incidents}
    assert found
    assert {v.detail for v in found} == {"slot_mapping of CPUAttentionMetadata"}
    # The same list names them for the position before.
    assert {v.stored_value - v.slot for v in found if v.position % BLOCK} == {1}
    assert {v.request for v in found} == {"r0", "r1"}
    # The stores went there, so other findings follow.
    assert Kind.READ_TABLE in roots


def one_short_in_decode(metadata: Any) -> None:
    """As vllm#53919: the new token is not counted yet."""
    if metadata.max_query_len == 1:
        metadata.seq_lens = metadata.seq_lens - 1


def chunk_without_context(metadata: Any) -> None:
    """As imp#986: a later chunk gets the length that it would have as the first one."""
    new = metadata.query_start_loc.diff()[: len(metadata.seq_lens)]
    metadata.seq_lens = torch.where(new > 1, new, metadata.seq_lens[: len(new)])


def queries_of_another_row(metadata: Any) -> None:
    """The second row of two begins one token early."""
    if len(metadata.query_start_loc) > 2:
        metadata.query_start_loc = metadata.query_start_loc.clone()
        metadata.query_start_loc[1] -= 1


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (one_short_in_decode, "seq_lens of CPUAttentionMetadata has {} tokens for {}, and {} are right (1 too few)"),
        (chunk_without_context, "seq_lens of CPUAttentionMetadata has {} tokens for {}, and {} are right (64 too few)"),
        (queries_of_another_row, "query_start_loc of CPUAttentionMetadata has {} tokens for {}, and {} are right"),
    ],
)
def test_a_wrong_length_in_the_metadata_is_told_in_the_forward_that_reads_by_it(engine, change, said):
    """Tables, slots and tokens are right, so nothing else is found but what the kernel left in a row that it did not
    compute, which may be NaN or what lay there before; and a persistent mistake is told once a request."""
    with guarded.guard(engine.small, table_interval=1, read_check=0, lifetime=False) as guard:
        broken: list[int] = []

        def changed(metadata: Any) -> None:
            seq, starts = metadata.seq_lens, metadata.query_start_loc
            change(metadata)
            if not (torch.equal(seq, metadata.seq_lens) and torch.equal(starts, metadata.query_start_loc)):
                broken.append(guard.canary.forwards + 1)

        patches = built(engine.small, changed)
        for name, first in (("r0", 7), ("r1", 8)):
            engine.small.submit(name, [first] * 100, 6)
        finish(engine.small)
        patches.undo()
        guard.canary.drain()
        assert {v.kind for v in guard.findings.violations} <= {Kind.READ_LENGTH, Kind.NON_FINITE, Kind.LOST_WRITE}
        found = [v for v in guard.findings.violations if v.kind is Kind.READ_LENGTH]
        first = guard.findings.violations[0]
        assert (first.kind, first.step) == (Kind.READ_LENGTH, broken[0])
        assert said.format(first.found_value, first.request, first.stored_value) in first.explanation
        assert len({(v.request, v.found_value - v.stored_value) for v in found}) == len(found)
        assert {v.request for v in found} == {"r0", "r1"}
