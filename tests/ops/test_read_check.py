"""read_check: a program walks through the rows of a batch, from a tile to the next; which tiles are compared, and by
which program, makes no difference to what is found."""

import random
from collections import Counter as Counts

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.scenario import Scenario, differences, disturb, history, ring_rows, scenario, twin, write

from canary_core import BatchView, CanaryConfig, KVSource, Region, SlotTable
from canary_core.ops.backends import torch_backend, triton_backend
from canary_core.ops.kernels import launch, read_check
from canary_core.ops.state import RegionState, Shared
from canary_core.ops.torch import check as check_reference
from canary_core.ops.torch import read_check as read_check_reference
from canary_core.records import ALL_TILES, Counter, Cursor, Kind


def walk(patch: pytest.MonkeyPatch, tile: int, programs: int) -> None:
    """From now on a tile has ``tile`` places, and ``programs`` programs share the tiles."""
    patch.setattr(launch, "INTERPRETED_PROGRAMS", programs)
    tiles = read_check.READ_CHECK_TILES
    patch.setattr(read_check, "READ_CHECK_TILES", type(tiles)(*(one._replace(slots=tile) for one in tiles)))
    patch.setattr(check_reference, "READ_TILE", tile)
    patch.setattr(read_check_reference, "READ_TILE", tile)


def seen_in(s: Scenario, state: RegionState, batch: BatchView, table: SlotTable) -> set[str]:
    """What is special about a batch."""
    region, first = s.region, int(state.cursors[Cursor.READ])
    special = {
        "window": region.window_tokens is not None, "ring": s.ring_slots > 1, "page ring": region.page_ring is not None,
        "groups": region.tokens_per_slot > 1, "pool page": s.pool_page is not None, "pages": s.page_size > 1,
        "map": region.slot_map is not None, "ragged": table.entries.shape[0] == 1 and batch.rows > 1,
        "tail": any(x.chunk_bytes % 4 for x in region.sources), "few present": any(x.present for x in region.sources),
        "empty row": bool((batch.prefix_lens == 0).any()) and bool((batch.prefix_lens > 0).any()),
        "wrapped": first > 0,
    }  # fmt: skip
    return {name for name, there in special.items() if there}


def run(seed: int, tile: int, programs: int, budget: int) -> "Counts[str]":
    """Runs a history on the reference, and each read check on the kernels too; gives what was seen."""
    reference, kernels = torch_backend(), triton_backend()
    seen: Counts[str] = Counts()
    with pytest.MonkeyPatch.context() as patch:
        walk(patch, tile, programs)
        s = scenario(seed)
        state = s.state()
        state.cursors[Cursor.READ_TILES] = budget
        # Far along, as in an engine that has served for days.
        state.cursors[Cursor.READ] = random.Random(seed).choice([0, 2**40 + 1])
        for batch, table in history(s, steps=3):
            state.require_capacity(batch)
            disturb(s, state)
            reference.check(state, batch, table)
            other = twin(state)
            reference.read_check(state, batch, table)
            kernels.read_check(other, batch, table)
            assert differences(state, other, batch.tokens) == [], f"{seed=}, {tile=}, {programs=}, {budget=}"
            if state.sources:
                seen.update(seen_in(s, state, batch, table))
            write(s)
            reference.fingerprint(state, batch, table)
            reference.record(state, batch, table)
        seen["compared"] += int(state.shared.counters[Counter.CHECKED_BYTES])
        seen["found"] += sum(row[0] == Kind.BYTES for row in ring_rows(state))
    return seen


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    tile=st.sampled_from([1, 2, 4, 16, 32]),
    programs=st.sampled_from([1, 2, 5, 40]),
    budget=st.sampled_from([0, 1, 3, 7, ALL_TILES]),
)
def test_any_walk_equals_the_reference(seed, tile, programs, budget):
    """On random regions and batches, whatever the tile, with fewer programs than tiles and more of them, and with
    budgets smaller than a batch: then a forward goes on where the one before ended, past the last row to the first."""
    run(seed, tile, programs, budget)


def test_every_kind_of_batch_is_walked_through():
    """The same over fixed seeds, among which is each kind of table and region, so the above is not vacuous."""
    seen: Counts[str] = Counts()
    for seed in range(20):
        seen += run(seed, (2, 4, 1)[seed % 3], (2, 5, 40)[seed % 3], (3, ALL_TILES, 7)[seed % 3])
    everything = ("window", "ring", "page ring", "groups", "pool page", "pages", "map", "ragged", "tail", "few present",
                  "empty row", "wrapped", "compared", "found")  # fmt: skip
    assert {name: seen[name] > 0 for name in everything} == dict.fromkeys(everything, True)


@pytest.mark.parametrize("programs", [1, 3, 4, 9])
def test_a_round_of_small_budgets_compares_each_place_once(programs, monkeypatch):
    """Rows of 5, 0, 1, 12 and 0 places are 6 tiles of 4. Six forwards of 4 tiles go round four times, every third one
    past the last row to the first; so each place is compared four times."""
    walk(monkeypatch, 4, programs)
    prefixes = [5, 0, 1, 12, 0]
    source = KVSource(torch.zeros(64, 5, dtype=torch.uint8), "k", 0, chunk_bytes=5, slot_stride_bytes=5)
    config = CanaryConfig(ring_rows=64, read_check=-1, non_finite=False)
    state = RegionState(Region("kv", 64, (source,)), 0, Shared.allocate(config, torch.device("cpu")), config)
    state.cursors[Cursor.READ_TILES] = 4
    torch_backend().baseline(state)
    table = SlotTable(torch.randperm(60)[: 5 * 12].view(5, 12))
    batch = BatchView(
        torch.tensor(prefixes), torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64),
        torch.arange(5, dtype=torch.int32), {"kv": table},
    )  # fmt: skip
    state.require_capacity(batch)
    tiles = sum(-(-n // 4) for n in prefixes)
    assert tiles == 6
    for _ in range(tiles):
        torch_backend().check(state, batch, table)
        triton_backend().read_check(state, batch, table)
    assert int(state.shared.counters[Counter.CHECKED_BYTES]) == 4 * sum(prefixes) * 5
