"""Sequences that two regions keep, each in slots of its own: what one knows of them, the other must agree with."""

import torch
from torch import Tensor

from canary_core.ops.state import RegionState
from canary_core.records import CHAINS, POSITION, PREFIX_HASH, STATES, State


def expect_sequences(state: RegionState, source: RegionState, slots: Tensor, batch: tuple[Tensor, Tensor]) -> None:
    """Before a forward: what it reads in ``state`` must be of the sequences whose last tokens ``source`` has in
    ``slots`` (integer ``[rows]``), else it is a PREFIX finding. ``batch``: prefix lengths and writers of the rows. For
    requests that come new to a region that keeps one slot of each sequence, and so can't be held against the slot
    before it. Rows of which ``source`` has no sure record, or whose writer is not known, are left to `check` as they
    are. Never captured; never waits for the device."""
    lengths, writers = (tensor.long() for tensor in batch)
    slots = slots.long()
    there = (slots >= 0) & (slots < source.region.slots)
    record = source.records[torch.where(there, slots, 0)]
    hashes = record[:, PREFIX_HASH : PREFIX_HASH + 2].contiguous().view(torch.int64)[:, 0]
    sure = there & (lengths > 0) & (writers >= 0) & (hashes != 0)
    sure &= record[:, POSITION].long() == (lengths - 1) * STATES + int(State.WRITTEN)
    # Other rows repeat the first sure one: the same value written twice does no harm.
    row = torch.where(sure, torch.arange(len(slots), device=slots.device), sure.int().argmax())
    entry = writers[row].clamp(min=0) % CHAINS
    ends = torch.stack((writers << 32 | lengths, hashes), dim=1)[row]
    state.chains[entry] = torch.where(sure.any(), ends, state.chains[entry])
