"""A case on the device: pool, records of everything in the cache, and the batches to time."""

import copy
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from benchmarks.cases import CACHE_EVENTS, EVENTS, TOGETHER, Case
from benchmarks.layouts import LAYOUTS
from canary_adapters import ragged_table
from canary_core import BatchView, CanaryConfig, ReadLens, ReadTable, Region, SlotTable
from canary_core.ops.backends import Backend, torch_backend
from canary_core.ops.blocks import BlockShape
from canary_core.ops.launches import LaunchCache
from canary_core.ops.repair_rows import REPAIR_WORDS
from canary_core.ops.state import RegionState, Shared
from canary_core.ops.weights import WeightRange, WeightTable
from canary_core.recomputer import Computed
from canary_core.records import (
    BLOCK_VALUES,
    PLAN_WORDS,
    POSITION,
    PROBE,
    STATES,
    STEP_WRITTEN,
    Cursor,
    Happened,
    ScrubWord,
    State,
)

REGION = "kv"
VOCABULARY = 128_000
BLOCK_SLOTS = 16
"""Slots of a block of the ledger."""
REPAIRS = 16
"""Findings of one launch."""
SECTOR_BYTES = 32
"""Smallest unit that device memory moves; a record is one."""


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One of a case's batches. ``state`` is a view of the case's state with scratch of its own (plan, heads, cursors,
    what the scrub lists), so that one op of many batches can be launched in a row. ``rows``: its rows among all of the
    setting's. ``read_slots``: what it reads, for events. ``given``: the same as a list that attention was given."""

    state: RegionState
    batch: BatchView
    table: SlotTable
    rows: slice
    read_slots: Tensor
    given: Tensor

    def run(self, backend: Backend, op: str) -> None:
        """Launches ``op`` for this batch."""
        self.on(self.state, backend, op)

    def on(self, state: RegionState, backend: Backend, op: str) -> None:
        """The same on another state, e.g. a copy."""
        if op in (*EVENTS, *CACHE_EVENTS):
            getattr(backend, op)(state, self.read_slots, self.rows.start)
        elif op in ("verify", "adopt"):
            getattr(backend, op)(state, self.read_slots)
        elif op == "note":
            backend.note(state, self.read_slots, Happened.COPY, self.read_slots)
        elif op == "note_store":
            backend.note_store(state, self.batch, range(len(state.sources)))
        elif op == "compare_tables":
            backend.compare_tables(state, self._read_table(), [0] * 3, True)
        elif op == "gather_blocks":
            slots = self.read_slots[: len(self.read_slots) // BLOCK_SLOTS * BLOCK_SLOTS]
            words = BLOCK_VALUES + state.sources.columns
            # It changes nothing of the state, so its rows go where a comparison of two states looks.
            rows = state.chains.view(-1)[: len(slots) // BLOCK_SLOTS * words].view(-1, words)
            backend.gather_blocks(state, slots, BlockShape(BLOCK_SLOTS), rows, 0)
        elif op == "repair":
            backend.repair(state, self._asked(state))
        elif op == "compare_weights":
            table = weight_table(state)
            backend.compare_weights(state, table, 0, table.chunks)
        elif op == "compare_kv":
            sources, slots = state.region.sources, self.read_slots
            # The request after has other KV; the sums go where a comparison of two states looks.
            computed = Computed(sources, slots.roll(1))
            sums = 2 * len(sources) * len(slots)
            out = state.chains.view(torch.float32).flatten()[:sums].view(2, len(sources), len(slots))
            backend.compare_kv(state, range(len(sources)), slots, computed, out)
        elif op in ("scrub", "baseline"):
            getattr(backend, op)(state)
        else:
            getattr(backend, op)(state, self.batch, self.table)

    def _asked(self, state: RegionState) -> Tensor:
        """Findings of intact parked slots: fingerprinted and searched for a word, which is not there. The rows go where
        a comparison of two states looks."""
        slots = self.read_slots[:REPAIRS].long()
        state.records[slots, POSITION] |= int(State.PARKED)
        rows = state.chains.view(-1)[: len(slots) * REPAIR_WORDS].view(-1, REPAIR_WORDS).zero_()
        stored, records = state.fingerprints[slots, 0], state.records[slots].long()
        given = (
            slots,
            torch.zeros_like(slots),
            stored,
            stored,
            records[:, STEP_WRITTEN],
            records[:, POSITION] // STATES,
        )
        rows[:, : len(given)] = torch.stack(given, 1)
        return rows

    def _read_table(self) -> ReadTable:
        """``given`` beside the table, and two lengths: every row reads as many positions."""
        batch = self.batch
        starts = batch.prefix_lens.cumsum(0) - batch.prefix_lens
        first = torch.zeros_like(batch.prefix_lens)
        given = ragged_table(self.given, starts)
        lens = (ReadLens("seq_lens", batch.prefix_lens, batch.prefix_lens),) * 2
        return ReadTable("kv_indices", REGION, given, self.table, first, batch.prefix_lens, batch.writers, lens=lens)


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """All requests of a case. slots: int64 ``[rows, context + new]``, tokens: int64 likewise, entries: the table."""

    slots: Tensor
    tokens: Tensor
    entries: Tensor
    page_size: int

    @classmethod
    def random(cls, case: Case, device: torch.device) -> "Traffic":
        """Random tokens; slots (pages, where the layout has them) in random order. Page 0 stays free."""
        shape, page = case.shape, LAYOUTS[case.layout].page_size
        rows, length = shape.rows * shape.sets, shape.context_tokens + shape.new_tokens
        shared, own = shape.sets * (shape.shared_tokens // page), -(-(length - shape.shared_tokens) // page)
        pages = torch.randperm(shared + rows * own, device=device) + 1
        first = pages[:shared].view(shape.sets, -1).repeat_interleave(shape.rows, 0)
        entries = torch.cat((first, pages[shared:].view(rows, own)), 1)
        slots = (entries[:, :, None] * page + torch.arange(page, device=device)).view(rows, -1)[:, :length]
        tokens = torch.randint(0, VOCABULARY, (rows, length), device=device)
        common = tokens[:: shape.rows, : shape.shared_tokens]
        tokens[:, : shape.shared_tokens] = common.repeat_interleave(shape.rows, 0)
        return cls(slots.contiguous(), tokens, entries.int().contiguous(), page)

    @property
    def last_slot(self) -> int:
        """Highest slot number in use."""
        return (int(self.entries.max()) + 1) * self.page_size - 1

    def batch(self, rows: slice, first: int, end: int, expected: bool) -> BatchView:
        """The forward of ``rows`` that writes positions ``[first, end)`` of each."""
        device = self.tokens.device
        # As engines do it: one table of all requests, and which of its rows these are.
        index = torch.arange(len(self.tokens), device=device)[rows]
        count = len(index)
        lengths = partial(torch.full, (count,), dtype=torch.int32, device=device)
        write_slots = flat(self.slots[rows, first:end])
        table = SlotTable(self.entries, index, self.page_size, write_slots=write_slots)
        return BatchView(
            prefix_lens=lengths(first),
            new_lens=lengths(end - first),
            token_ids=flat(self.tokens[rows, first:end]),
            writers=index.int(),
            tables={REGION: table},
            positions=torch.arange(first, end, device=device).repeat(count),
            expected_tokens=self.tokens[rows].int() if expected else None,
        )


class Setting:
    """``case`` on the device of ``state``, with everything in the cache recorded (by the torch reference) and ready to
    launch. The state's region must be `region`'s, its fingerprints zero."""

    def __init__(self, case: Case, traffic: Traffic, state: RegionState) -> None:
        self.case = case
        self.traffic = traffic
        self.state = state
        self.device = state.records.device
        shape = case.shape
        if shape.context_tokens:
            self._prime()
        self._write_spare()
        self.write_slots = flat(traffic.slots[:, shape.context_tokens :])
        self.reset()
        if case.scrub_bytes:
            slots = min(max(case.scrub_bytes // state.sources.slot_bytes, 1), state.listed_slots)
            for word in (Cursor.SCRUB_SLOTS, Cursor.SCRUB_RUNNING):
                state.cursors[word] = slots
            state.cursors[Cursor.SCRUB_PASS] = state.region.slots
        self.forwards = [self._forward(i) for i in range(shape.sets)]

    @classmethod
    def make(cls, case: Case, device: torch.device) -> "Setting":
        """With a state of its own."""
        torch.manual_seed(0)
        traffic = Traffic.random(case, device)
        read_check = -1 if "read_check" in case.ops else 0
        shares = "all" if case.has_bytes else "off"
        config = CanaryConfig.load(
            bytes=shares,
            read_check=read_check,
            store_check="note_store" in case.ops,
            # Room for what all readers of a slot find.
            ring_rows=max(1024, 16 * case.shape.rows),
        )
        return cls(case, traffic, RegionState(region(case, traffic), 0, Shared.allocate(config, device), config))

    def reset(self) -> None:
        """Makes the slots that the batches write unwritten again, as they are before a real forward: a fingerprint
        that did not change would be a suspicion, and cost more."""
        self.state.records.index_fill_(0, self.write_slots, 0)
        if self.state.sources:
            self.state.fingerprints.index_fill_(0, self.write_slots, 0)

    def plan(self, backend: Backend) -> None:
        """What the case's ops need of those before them in a step."""
        for forward in self.forwards:
            forward.run(backend, "check")
            if "compare_stores" in self.case.ops:
                forward.run(backend, "fingerprint")

    @property
    def floor_bytes(self) -> int:
        """Fewest bytes that one launch of the case's ops must move: each input once, each output once."""
        return sum(self._floor_bytes(op) for op in self.case.ops)

    def _floor_bytes(self, op: str) -> int:
        shape, state = self.case.shape, self.state
        reads, writes = shape.rows * shape.context_tokens, shape.rows * shape.new_tokens
        records = reads - (shape.rows - 1) * shape.shared_tokens
        entry = 4 / self.traffic.page_size
        plan, claim, token = 64, 8, 8
        known = 4 if self.case.tokens else 0
        prints = 8 * state.sources.columns
        # One sector, read and written.
        history = 0 if state.histories is None else 2 * SECTOR_BYTES
        scrubbed = int(state.cursors[Cursor.SCRUB_SLOTS])
        if op == TOGETHER:
            return self._floor_bytes("fingerprint") + self._floor_bytes("record")
        return int(
            {
                "check": reads * (entry + known) + records * SECTOR_BYTES + writes * (8 + plan + claim + SECTOR_BYTES),
                "read_check": reads * (entry + prints + state.sources.slot_bytes),
                "fingerprint": writes * (plan + claim + token + 2 * prints + state.sources.slot_bytes),
                "note_store": writes * (plan + claim + prints + state.sources.slot_bytes),
                "compare_stores": writes * (plan + claim + 3 * prints),
                "record": writes * (plan + claim + 2 * token + entry + known + SECTOR_BYTES + history),
                "scrub": scrubbed * (SECTOR_BYTES + prints + state.sources.slot_bytes),
                "verify": reads * (8 + SECTOR_BYTES + prints + state.sources.slot_bytes),
                "adopt": reads * (8 + prints + state.sources.slot_bytes),
                "repair": min(reads, REPAIRS) * (2 * state.sources[0].slot_bytes + SECTOR_BYTES) if prints else 0,
                "compare_tables": reads * (entry + 8) + 2 * shape.rows * 8,
                "compare_kv": reads * 2 * (8 + state.region.slot_bytes + 4 * len(state.region.sources)),
                "gather_blocks": reads * (8 + SECTOR_BYTES + prints * (1 + 1 / BLOCK_SLOTS)),
                **dict.fromkeys((*EVENTS, *CACHE_EVENTS), reads * (8 + 2 * SECTOR_BYTES + history)),
                "note": reads * (2 * 8 + history),
                "compare_weights": sum(source.tensor.nbytes for source in state.region.sources),
                "baseline": state.region.slots * (prints + state.sources.slot_bytes),
            }[op]
        )

    def _prime(self) -> None:
        shape = self.case.shape
        rows = shape.rows * shape.sets
        if shape.shared_tokens:
            self._write(slice(0, rows, shape.rows), 0, shape.shared_tokens)
        self._write(slice(0, rows), shape.shared_tokens, shape.context_tokens)
        found = int(self.state.shared.counters[:PROBE].sum())
        if found:
            raise RuntimeError(f"{self.case.name}: building the case raised {found} findings; its data is not clean")

    def _write(self, rows: slice, first: int, end: int) -> None:
        backend = torch_backend()
        batch = self.traffic.batch(rows, first, end, expected=False)
        table = batch.tables[REGION]
        scratch = _scratch(self.state, batch)
        scratch.cursors = self.state.cursors.clone()
        backend.check(scratch, batch, table)
        if self.state.sources:
            backend.fingerprint(scratch, batch, table)
        backend.record(scratch, batch, table)

    def _write_spare(self) -> None:
        """Slots beyond the requests' hold the bytes they have, recorded: a scrub passes over nothing unwritten."""
        if not self.case.shape.spare_slots:
            return
        torch_backend().baseline(self.state)
        self.state.records[self.traffic.last_slot + 1 :, POSITION] = int(State.WRITTEN)

    def _forward(self, number: int) -> Forward:
        shape = self.case.shape
        rows = slice(number * shape.rows, (number + 1) * shape.rows)
        first = shape.context_tokens
        batch = self.traffic.batch(rows, first, first + shape.new_tokens, self.case.tokens)
        view = _scratch(self.state, batch)
        view.cursors = self.state.cursors.clone()
        self._list(view, number)
        read_slots = flat(self.traffic.slots[rows, :first])
        return Forward(view, batch, batch.tables[REGION], rows, read_slots, read_slots.clone())

    def _list(self, view: RegionState, number: int) -> None:
        """The scrub of a case's ``number``-th batch compares the next stretch of written slots, and goes on there."""
        most, slots = int(view.cursors[Cursor.SCRUB_SLOTS]), view.region.slots
        written = (view.records[:, POSITION] % STATES == State.WRITTEN).nonzero()[:, 0]
        view.listed = self.state.listed.clone()
        if not (most and len(written)):
            return
        chosen = torch.arange(number * most, (number + 1) * most, device=self.device)[: len(written)] % len(written)
        view.listed[0, : len(chosen)] = written[chosen].int()
        for word in (Cursor.SCRUB, Cursor.SCRUB_NEXT):
            view.cursors[word + ScrubWord.LIST] = len(chosen)
            view.cursors[word + ScrubWord.RUNNING] = (int(written[chosen[-1]]) + 1) % slots


def region(case: Case, traffic: Traffic) -> Region:
    """The case's pool, with random bytes."""
    layout = LAYOUTS[case.layout]
    slots = traffic.last_slot + 1 + case.shape.spare_slots
    return Region(REGION, slots, layout.sources(slots, case.shape.layers, traffic.slots.device), null_slot=0)


def _scratch(state: RegionState, batch: BatchView) -> RegionState:
    view = copy.copy(state)
    view.scratch = copy.copy(state.scratch)
    view.scratch.heads = state.scratch.heads.new_zeros(batch.rows)
    view.scratch.plan = state.scratch.plan.new_zeros(batch.tokens, PLAN_WORDS)
    # Launches on the original know its addresses.
    view.launches = LaunchCache()
    return view


def weight_table(state: RegionState) -> WeightTable:
    """The memory of the region's sources as if it were a model's weights, once for each state."""
    known = _weight_tables.get(state)
    if known is None:
        tensors = [source.tensor.view(torch.uint8).view(-1) for source in state.region.sources]
        ranges = [WeightRange(tensor.data_ptr(), tensor.nbytes, tensor.detach) for tensor in tensors]
        known = _weight_tables[state] = WeightTable(ranges, state.records.device, state.sources.fingerprint_keys)
        # Where a comparison of two states looks.
        known.fingerprints = state.chains.view(-1)[: known.chunks]
    return known


_weight_tables: "WeakKeyDictionary[RegionState, WeightTable]" = WeakKeyDictionary()


def flat(values: Tensor) -> Tensor:
    """All values in one dimension, contiguous."""
    return values.reshape(-1).contiguous()
