"""Sequences kept in two regions, such as the KV of a prefix and the recurrent state after the prefix: parts reused
together must have the same prefix hash."""

import torch
from torch import Tensor

from canary_core.ops.mapping import int64_words
from canary_core.ops.state import RegionState
from canary_core.records import CHAINS, POSITION, PREFIX_HASH, STATES, UNPARKED, State


def expect_sequences(
    state: RegionState, source: RegionState, slots: Tensor, *, lengths: Tensor, writers: Tensor
) -> None:
    """Before a forward: each row must read a slot of ``state`` that belongs to the sequence whose last token ``source``
    has in ``slots``, else `check` raises a PREFIX finding. For requests new to a region with one slot per sequence,
    where no earlier slot can be compared.

    slots: integer ``[rows]``, slots of ``source``. lengths, writers: integer ``[rows]``, prefix length and writer id of
    each row. Rows are left alone if ``source`` has no sure record of them, or the writer is unknown (-1).
    Never captured; never waits for the device.
    """
    slots, lengths, writers = slots.long(), lengths.long(), writers.long()
    there = (slots >= 0) & (slots < source.region.slots)
    record = source.records[torch.where(there, slots, 0)]
    hashes = int64_words(record, PREFIX_HASH)
    sure = there & (lengths > 0) & (writers >= 0) & (hashes != 0)
    sure &= record[:, POSITION].long() & UNPARKED - STATES == (lengths - 1) * STATES + int(State.WRITTEN)
    # Other rows repeat the first sure one: the same value written twice does no harm.
    row = torch.where(sure, torch.arange(len(slots), device=slots.device), sure.int().argmax())
    entry = writers[row].clamp(min=0) % CHAINS
    ends = torch.stack((writers << 32 | lengths, hashes), dim=1)[row]
    state.chains[entry] = torch.where(sure.any(), ends, state.chains[entry])
