"""Every op is there twice, and both give the same bits: the Triton kernels (on the interpreter, or on a GPU) and their
torch reference."""

import random
from collections import Counter as Counts

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.scenario import (
    blocks,
    differences,
    disturb,
    events,
    history,
    notes,
    ownership,
    read_table,
    ring_rows,
    sample,
    scenario,
    twin,
    write,
)

from canary_core.batch import BatchView, SlotTable
from canary_core.ops import sums
from canary_core.ops.backends import Backend, torch_backend, triton_backend
from canary_core.ops.kernels import check as check_kernels
from canary_core.ops.kernels import fingerprint_record as together_kernels
from canary_core.ops.kernels import histories as history_kernels
from canary_core.ops.kernels import record as record_kernels
from canary_core.ops.kernels import tables as table_kernels
from canary_core.ops.state import RegionState
from canary_core.ops.torch import check as check_reference
from canary_core.records import ALL_TILES, BLOCK_VALUES, PROBE, Counter, Cursor, Kind, Phase

EVENTS = ("alloc", "park", "share", "evict", "free")
"""What happens to who has a slot."""

CHUNKED = 64
"""The first seed of `scenario` with a region of chunks."""

OPS = (
    *("check", "compare_tables", "read_check", "note_store", "fingerprint", "note_store", "compare_stores", "record"),
    *("scrub", "verify", "adopt", "note", *EVENTS),
)
"""In the order of a step. A store is noted before the bytes change for the last time, and sometimes after that."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles so small that every batch has several, in rows and across them."""
    monkeypatch.setattr(check_kernels, "TILE", 8)
    monkeypatch.setattr(check_reference, "CHECK_TILE", 8)
    monkeypatch.setattr(record_kernels, "TILE", 4)
    monkeypatch.setattr(together_kernels, "TILE", 4)
    monkeypatch.setattr(history_kernels, "TILE", 4)
    monkeypatch.setattr(table_kernels, "TILE", 4)
    monkeypatch.setattr(table_kernels, "PARTS", 2)


def run(seed: int, device: str, seen: "Counts[str] | None" = None, shared: bool = False) -> set[int]:
    """Runs a history on both back ends, comparing after every op; gives the kinds that were found, and adds the
    device's counters to ``seen``. ``shared``: layers share fingerprints."""
    reference, kernels = torch_backend(), triton_backend()
    s, layers = scenario(seed, device, layers=5 if shared else 0), random.Random(f"layers {seed}")
    state = s.state(read_check=s.random.choice([-1, 40]), memory="1%" if shared else "exact")
    assert bool(state.sources.sums) == shared
    state.cursors[Cursor.CHECK_TILES] = s.random.choice([ALL_TILES, 3])
    kinds: set[int] = set()
    forwards = history(s, steps=3)
    for i, (batch, table) in enumerate(forwards):
        state.require_capacity(batch)
        disturb(s, state)
        for op in OPS:
            if op == "fingerprint":
                write(s)
                assert together(reference, kernels, state, batch, table) == [], f"seed {seed}, together"
            other = twin(state)
            arguments = (batch, table)
            if op == "scrub":
                arguments = (s.unknown.random() < 0.5,)
            elif op in ("note_store", "compare_stores") and not state.stores.numel():
                continue
            elif op == "note_store":
                columns = range(len(state.sources))
                arguments = (batch, layers.sample(columns, layers.randint(0, len(columns))))
            elif op in ("verify", "adopt"):
                arguments = (events(s),)
                if op == "verify":
                    assert in_pages(reference, kernels, state, arguments[0]) == [], f"seed {seed}, pages"
            elif op == "compare_tables":
                if s.region.tokens_per_slot > 1:
                    continue
                given_to_attention = read_table(s, batch, table)
                arguments = (given_to_attention, [3, 4, 5][: 1 + len(given_to_attention.lens)])
            elif op == "note":
                arguments = notes(s)
            elif op in EVENTS:
                arguments = ownership(s)
            getattr(reference, op)(state, *arguments)
            getattr(kernels, op)(other, *arguments)
            assert differences(state, other, batch.tokens) == [], f"seed {seed}, op {op}"
        sample(s, state, batch, forwards[i + 1][0] if i + 1 < len(forwards) else None)
        for block, slots in blocks(s, table):
            first = s.random.randint(0, 2)
            shape = (first + block.blocks(len(slots)), BLOCK_VALUES + state.sources.columns)
            rows = torch.full((2, *shape), -7, dtype=torch.int64, device=device)
            reference.gather_blocks(state, slots, block, rows[0], first)
            kernels.gather_blocks(state, slots, block, rows[1], first)
            assert torch.equal(rows[0], rows[1]), f"seed {seed}, {block}"
            assert bool((rows[0, :first] == -7).all())
        kinds |= {row[0] for row in ring_rows(state)}
    if seen is not None:
        seen.update({c.name: int(state.shared.counters[c]) for c in Counter})
        seen["input"] += sum(row[0] == Kind.WRITE_INPUT and row[8] >= 0 for row in ring_rows(state))
        seen["stores"] += sum(row[0] == Kind.BYTES and row[14] % 8 == Phase.POST_FORWARD for row in ring_rows(state))
        seen["tail"] += sum(row[0] == Kind.TOKEN and row[14] % 8 == Phase.POST_FORWARD for row in ring_rows(state))
    return kinds


def together(reference: Backend, kernels: Backend, state: RegionState, batch: BatchView, table: SlotTable) -> list[str]:
    """What differs, on copies of ``state``, where a forward is fingerprinted and recorded in one launch, or in the
    other order."""
    one, launched, swapped = twin(state), twin(state), twin(state)
    reference.fingerprint_record(one, batch, table)
    kernels.fingerprint_record(launched, batch, table)
    reference.record(swapped, batch, table)
    reference.fingerprint(swapped, batch, table)
    return differences(one, launched, batch.tokens) + differences(one, swapped, batch.tokens)


def in_pages(reference: Backend, kernels: Backend, state: RegionState, slots: torch.Tensor) -> list[str]:
    """What differs, on copies of ``state``, where the pages of ``slots`` are verified, each of three slots; and from
    their slots one by one."""
    one, launched, listed = twin(state), twin(state), twin(state)
    pages = slots // 3
    reference.verify(one, pages, 3)
    kernels.verify(launched, pages, 3)
    reference.verify(listed, (pages[:, None] * 3 + torch.arange(3, device=slots.device)).flatten(), 1)
    return differences(one, launched, 0) + differences(one, listed, 0)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6))
def test_kernels_equal_reference(seed):
    """On random layouts, tables, batches and faults every op leaves the same bits behind."""
    run(seed, "cpu")


def test_kernels_equal_reference_with_chunks():
    """A region whose tokens attend to those of their own chunk."""
    assert scenario(CHUNKED).region.chunked
    run(CHUNKED, "cpu")


@pytest.fixture(params=[0, 3], ids=["one half", "all halves"])
def shared(monkeypatch, request):
    """Layers share fingerprints in groups of up to three, of one half or of all, however small the pool."""
    monkeypatch.setattr(sums, "FREE_BYTES", 0)
    monkeypatch.setattr(sums, "MOST_PARTS", 3)
    monkeypatch.setattr(sums, "MOST_LAYERS", request.param)


@pytest.mark.parametrize("seed", range(4))
def test_kernels_equal_reference_with_shared_fingerprints(shared, seed):
    """As above, where layers share fingerprints."""
    run(seed, "cpu", shared=True)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
def test_kernels_equal_reference_with_shared_fingerprints_on_the_gpu(shared, seed):
    """The same on a GPU."""
    run(seed, "cuda", shared=True)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [*range(10), 13, 32, CHUNKED])
def test_kernels_equal_reference_on_the_gpu(seed):
    """The same on a GPU, compiled. Few seeds, all kinds of regions among them: nearly every one is a layout of its own
    to compile for."""
    run(seed, "cuda")


@pytest.mark.timeout(900)
def test_kernels_equal_reference_whatever_is_found():
    """The same over fixed seeds, among which every kind of finding that a device raises is, a probe, and forwards that
    compute, and read, tokens that the sampler gave and others, and some that the engine has replaced: the fuzz above is
    not vacuous."""
    found: set[int] = set()
    seen: Counts[str] = Counts()
    for seed in (40, 143):
        found |= run(seed, "cpu", seen)
    not_by_ops = {Kind.CACHE_STRUCTURE, Kind.ARRIVAL, Kind.WEIGHTS, Kind.RECOMPUTE, Kind.ATTENTION, Kind.RANKS}
    assert found == {*Kind, PROBE} - not_by_ops
    assert seen["SAMPLED_TOKENS"] > seen["input"] + seen["tail"] + seen["UNSURE"]
    assert min(seen["input"], seen["stores"], seen["tail"], seen["UNSURE"]) > 0
