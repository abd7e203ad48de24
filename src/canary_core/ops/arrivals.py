"""Slots whose bytes come without a forward and without records, of a sequence whose tokens are known: the records that
they get, and whether a forward was there first. In torch on every device; never waits for it."""

import torch
from torch import Tensor

from canary_core.ops import payload
from canary_core.ops.payload import PayloadLayout
from canary_core.ops.state import RegionState
from canary_core.records import (
    PAYLOAD_FINGERPRINTS,
    PAYLOAD_RECORD,
    PAYLOAD_STAMP,
    POSITION,
    PREFIX_HASH,
    RECORD_WORDS,
    STATES,
    TOKEN,
    UNPARKED,
    Clock,
    State,
)


def sequence_rows(layout: PayloadLayout, tokens: Tensor, first: int, hashes: Tensor) -> Tensor:
    """The payload rows, without fingerprints, of the positions from ``first`` on: int64
    ``[n, PAYLOAD_FINGERPRINTS]`` on the host. ``tokens``, ``hashes``: int64 ``[n]`` there, each position's token and
    prefix hash, 0 where that is not known."""
    rows = torch.zeros(len(tokens), PAYLOAD_FINGERPRINTS, dtype=torch.int64, device="cpu")
    # Another exporter than this Canary: who wrote it, and when, is said anew where they are imported.
    rows[:, PAYLOAD_STAMP] = layout.stamp ^ 1
    record = torch.zeros(len(tokens), RECORD_WORDS, dtype=torch.int32, device="cpu")
    record[:, TOKEN] = tokens.int()
    record[:, POSITION] = (torch.arange(first, first + len(tokens), device="cpu") * STATES + int(State.WRITTEN)).int()
    record[:, PREFIX_HASH : PREFIX_HASH + 2] = hashes.contiguous().view(torch.int32).view(-1, 2)
    rows[:, PAYLOAD_RECORD:] = record.view(torch.int64)
    return rows


def expect(state: RegionState, slots: Tensor, rows: Tensor, writer: int) -> None:
    """``slots`` (integer ``[n]``) are of the sequence that ``rows`` (`sequence_rows`, on the device) tells; what bytes
    they have is not known yet."""
    fingerprints = rows.new_zeros(len(rows), len(state.sources))
    payload.import_records(state, slots, torch.cat((rows, fingerprints), dim=1), writer)


def still_expected(state: RegionState, slots: Tensor, rows: Tensor) -> Tensor:
    """Which of ``slots`` are still what `expect` made of them with the same ``rows``: nobody was given them and no
    forward has written there, or is about to. bool ``[n]``."""
    slot, inside = _inside(state, slots)
    record = state.records[slot]
    wanted = rows[:, PAYLOAD_RECORD:].contiguous().view(torch.int32).view(-1, RECORD_WORDS)
    same = (record[:, TOKEN] == wanted[:, TOKEN]) & (record[:, PREFIX_HASH] == wanted[:, PREFIX_HASH])
    same &= record[:, PREFIX_HASH + 1] == wanted[:, PREFIX_HASH + 1]
    same &= record[:, POSITION] & UNPARKED - STATES == wanted[:, POSITION]
    same &= (state.fingerprints[slot] == 0).all(1)
    return inside & same & ~_in_flight(state, slot, inside)


def _inside(state: RegionState, slots: Tensor) -> tuple[Tensor, Tensor]:
    inside = (slots >= 0) & (slots < state.region.slots)
    return torch.where(inside, slots, 0).long(), inside


def _in_flight(state: RegionState, slot: Tensor, inside: Tensor) -> Tensor:
    """Which slots the forward writes that was checked and is not recorded yet, if there is one."""
    clock = state.shared.clock
    claimed = state.scratch.claiming_step(state.scratch.claims[slot]) == clock[Clock.NEXT]
    return inside & claimed & (clock[Clock.NEXT] != clock[Clock.STEP])
