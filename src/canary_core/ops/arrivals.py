"""Slots with bytes from elsewhere, without a forward and without records, of a sequence with known tokens: making their
records, and seeing whether a forward was there first. In torch on every device; never waits for the device."""

import torch
from torch import Tensor

from canary_core.ops import payload
from canary_core.ops.backends import Backend
from canary_core.ops.blocks import BlockShape
from canary_core.ops.hashing import mix
from canary_core.ops.payload import PayloadLayout
from canary_core.ops.state import RegionState
from canary_core.records import (
    BLOCK_FLAGS,
    BLOCK_SUM,
    BLOCK_VALUES,
    BLOCK_WHO,
    PAYLOAD_FINGERPRINTS,
    PAYLOAD_RECORD,
    PAYLOAD_STAMP,
    POSITION,
    PREFIX_HASH,
    RECORD_WORDS,
    STATES,
    STEP_WRITTEN,
    TOKEN,
    UNPARKED,
    Block,
    Clock,
    State,
)


def sequence_rows(layout: PayloadLayout, tokens: Tensor, first: int, hashes: Tensor) -> Tensor:
    """The payload rows, without fingerprints, of the positions from ``first`` on: int64 ``[n, PAYLOAD_FINGERPRINTS]``
    on the host. ``tokens``, ``hashes``: int64 ``[n]`` on the host, each position's token and prefix hash, 0 where
    unknown."""
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
    """Records ``slots`` (integer ``[n]``) as part of the sequence in ``rows`` (`sequence_rows`, on the device), with
    unknown bytes."""
    fingerprints = rows.new_zeros(len(rows), state.sources.columns)
    payload.import_records(state, slots, torch.cat((rows, fingerprints), dim=1), writer)


def token_sums(tokens: Tensor) -> Tensor:
    """A number for the tokens of each block, in order and wherever the block stands: int64 ``[n, slots]`` gives
    ``[n]``."""
    return mix(tokens, torch.arange(tokens.shape[1], device=tokens.device)).sum(1)


def content_before(backend: Backend, state: RegionState, slots: Tensor, page_slots: int) -> Tensor:
    """Block rows (`gather_blocks`) of ``slots``, integer ``[blocks * page_slots]``, with the tokens last written there:
    in `BLOCK_SUM` their `token_sums`, those of slots never written as -1. A block's writer is -1 then. Where a forward
    writes at the same time, on another stream, the bytes are unknown."""
    every = slots.view(-1, page_slots)
    tokens, written = _tokens(state, every)
    rows = state.fingerprints.new_empty(len(every), BLOCK_VALUES + state.sources.columns)
    backend.gather_blocks(state, slots, BlockShape(page_slots), rows, 0)
    # Tokens and fingerprints belong together where neither changed in between, nor is about to.
    moved = (_tokens(state, every)[0] != tokens) | _in_flight(state, *_inside(state, every))
    rows[:, BLOCK_FLAGS] &= ~(moved.any(1) * int(Block.BYTES))
    rows[:, BLOCK_SUM] = token_sums(tokens)
    rows[:, BLOCK_WHO] = torch.where(written[:, 0], rows[:, BLOCK_WHO], -1)
    return rows


def still_expected(state: RegionState, slots: Tensor, rows: Tensor) -> Tensor:
    """Whether each of ``slots`` still has the record made by `expect` with the same ``rows``, neither handed out since
    nor written, or about to be, by a forward: bool ``[n]``."""
    slot, inside = _inside(state, slots)
    record = state.records[slot]
    wanted = rows[:, PAYLOAD_RECORD:].contiguous().view(torch.int32).view(-1, RECORD_WORDS)
    same = (record[:, TOKEN] == wanted[:, TOKEN]) & (record[:, PREFIX_HASH] == wanted[:, PREFIX_HASH])
    same &= record[:, PREFIX_HASH + 1] == wanted[:, PREFIX_HASH + 1]
    same &= record[:, POSITION] & UNPARKED - STATES == wanted[:, POSITION]
    same &= (state.fingerprints[slot] == 0).all(1)
    return inside & same & ~_in_flight(state, slot, inside)


def _tokens(state: RegionState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens last written to ``slots``, -1 for none, and whether there was any."""
    slot, inside = _inside(state, slots)
    record = state.records[slot]
    written = inside & (record[..., STEP_WRITTEN] != 0)
    return torch.where(written, record[..., TOKEN].long(), -1), written


def _inside(state: RegionState, slots: Tensor) -> tuple[Tensor, Tensor]:
    inside = (slots >= 0) & (slots < state.region.slots)
    return torch.where(inside, slots, 0).long(), inside


def _in_flight(state: RegionState, slot: Tensor, inside: Tensor) -> Tensor:
    """Whether each slot is written by a forward already checked and not yet recorded, if there is one."""
    clock = state.shared.clock
    claimed = state.scratch.claiming_step(state.scratch.claims[slot]) == clock[Clock.NEXT]
    return inside & claimed & (clock[Clock.NEXT] != clock[Clock.STEP])
