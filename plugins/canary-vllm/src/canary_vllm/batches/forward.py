"""A forward of either runner as a `BatchView`. Its tensors are those read by vLLM's own kernels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canary_adapters import TABLE_STEP, FirstRows, PrefixLens, block_table, ring_table, slot_table
from canary_core import BatchAdapter, BatchView, SlotTable
from canary_vllm.batches.requests import Requests
from canary_vllm.pools.pool import Group


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A V2 runner's preparation of one forward: its `InputBatch`, block tables of all groups, and slot mappings
    ``[groups, tokens]``."""

    batch: Any
    block_tables: Sequence[Tensor]
    slot_mappings: Tensor


class V1Batches(BatchAdapter[Any]):
    """Views of the forwards of a V1 runner, from its persistent buffers: to be made right before the forward."""

    def __init__(self, runner: Any, groups: Sequence[Group], requests: Requests) -> None:
        self._runner = runner
        self._groups = groups
        self._lengths, self._firsts = PrefixLens(), FirstRows()
        self._requests = requests

    def view(self, batch: Any) -> BatchView | None:
        """``batch``: the scheduler's output. None where nothing is computed."""
        runner, inputs = self._runner, self._runner.input_batch
        rows = int(inputs.num_reqs)
        tokens = int(batch.total_num_scheduled_tokens)
        if not rows or not tokens:
            return None
        names, first = inputs.req_ids[:rows], self._firsts.of
        new = [batch.num_scheduled_tokens[name] for name in names]
        ends = first("ends", runner.seq_lens, rows)
        lengths = self._lengths.of(ends, first("starts", runner.query_start_loc.gpu, rows + 1), new)
        tables = {}
        for group in self._groups:
            table, region = inputs.block_table[group.number], group.region
            entries = first(region, table.block_table.gpu, rows)
            slots = first(f"slots {region}", table.slot_mapping.gpu, tokens)
            tables[region] = table_of(group, entries, slots, ends)
        ids, positions = first("ids", runner.input_ids.gpu, tokens), first("positions", runner.positions, tokens)
        own = self._requests.tokens(names, lambda: inputs.num_computed_tokens_cpu[:rows].tolist(), new, ids)
        return self._requests.view(names, lengths, own, tables, positions)


class V2Batches(BatchAdapter[Prepared]):
    """Views of the forwards of a V2 runner. Lengths are the device's: with drafted tokens the host does not know the
    number of accepted ones."""

    def __init__(self, groups: Sequence[Group], requests: Requests) -> None:
        self._groups = groups
        self._lengths = PrefixLens()
        self._requests = requests

    def view(self, batch: Prepared) -> BatchView | None:
        """None where nothing is computed."""
        inputs = batch.batch
        rows, tokens = int(inputs.num_reqs), int(inputs.num_tokens)
        if not rows or not tokens:
            return None
        new = inputs.num_scheduled_tokens[:rows].tolist()
        lengths = self._lengths.of(inputs.seq_lens[:rows], inputs.query_start_loc[: rows + 1], new)
        names = inputs.req_ids
        most = inputs.seq_lens_cpu_upper_bound[:rows].numpy() - inputs.num_scheduled_tokens[:rows]
        slots = batch.slot_mappings
        ends = inputs.seq_lens[:rows]
        tables = {
            g.region: table_of(g, batch.block_tables[g.number][:rows], slots[g.number][:tokens], ends)
            for g in self._groups
        }
        token_ids = self._requests.tokens(names, most.tolist, new, inputs.input_ids[:tokens])
        return self._requests.view(names, lengths, token_ids, tables, inputs.positions[:tokens])


def table_of(group: Group, entries: Tensor, slots: Tensor, ends: Tensor) -> SlotTable:
    """A forward's table of ``group``. ``entries``: its block table. ``slots``: slots of new tokens; a state lies in its
    request's first block, or in the block of its last token. ``ends``: each row's tokens in all."""
    if group.holds == "states":
        if group.page > 1:
            last = (ends.long() - 1).clamp(min=0) // group.page
            entries = entries.gather(1, last.clamp(max=entries.shape[1] - 1)[:, None])
        return ring_table(slot_table(entries), 1)
    return block_table(entries, group.page, write_slots=slots)


def padding(rows: int, runner: Any, groups: Sequence[Group], device: torch.device) -> Iterator[BatchView]:
    """A prefill and a decode of ``rows`` rows without reads and writes, for `Canary.warm_up`; with the runner's own
    block tables, for whose width kernels are compiled."""
    lengths = torch.zeros(rows, dtype=torch.int32, device=device)
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    v2 = getattr(runner, "block_tables", None)
    v1 = runner.input_batch.block_table.block_tables if v2 is None else ()
    own = [one.block_table.gpu for one in v1] if v2 is None else v2.input_block_tables
    tables = {g.region: table_of(g, own[g.number][:rows], positions, lengths) for g in groups}
    for expected in (None, torch.full((rows, TABLE_STEP), -1, dtype=torch.int32, device=device)):
        yield BatchView(lengths, lengths, lengths, lengths, tables, positions, expected, anchors=positions)
