"""A prefill of many tiles: what is hashed before a tile are all tokens before it, however they are loaded."""

import torch

from canary_core import BatchView, CanaryConfig, KVSource, Region, SlotTable
from canary_core.ops.backends import torch_backend, triton_backend
from canary_core.ops.kernels.record import TILE, TILES_AT_ONCE
from canary_core.ops.state import RegionState, Shared

NEW = (2 * TILE * TILES_AT_ONCE.value + TILE + 37, TILE * TILES_AT_ONCE.value + 1, 5, TILE + 1)
"""New tokens of each row."""


def recorded(backend):
    """The state after one forward without a prefix."""
    generator = torch.Generator().manual_seed(0)
    total = sum(NEW)
    slots = torch.randperm(total, generator=generator) + 1
    entries = torch.zeros(len(NEW), max(NEW), dtype=torch.int32)
    for row, new in enumerate(NEW):
        first = sum(NEW[:row])
        entries[row, :new] = slots[first : first + new].int()
    lens = torch.tensor(NEW, dtype=torch.int32)
    batch = BatchView(
        prefix_lens=torch.zeros_like(lens),
        new_lens=lens,
        token_ids=torch.randint(0, 128_000, (total,), generator=generator),
        writers=torch.arange(len(NEW), dtype=torch.int32),
        tables={"kv": SlotTable(entries, write_slots=slots)},
        positions=torch.cat([torch.arange(new) for new in NEW]),
    )
    config = CanaryConfig(mode="raise", bytes="off", read_check=0)
    region = Region("kv", total + 1, (KVSource(torch.zeros(total + 1, 1), "k", 0, 4, 4),), null_slot=0)
    state = RegionState(region, 0, Shared.allocate(config, torch.device("cpu")), config)
    state.require_capacity(batch)
    for op in ("check", "record"):
        getattr(backend, op)(state, batch, batch.tables["kv"])
    return state


def test_hashes_of_a_prefill_of_many_tiles_are_the_references():
    """Of rows that end in the middle of what is loaded at once, after it, and within the first tile; nothing is
    found."""
    ours, reference = recorded(triton_backend()), recorded(torch_backend())
    assert torch.equal(ours.records, reference.records)
    assert torch.equal(ours.chains, reference.chains)
    assert torch.equal(ours.shared.counters, reference.shared.counters)
    assert int(ours.shared.counters[:16].sum()) == 0
    assert int((ours.records != 0).any(1).sum()) == sum(NEW)
