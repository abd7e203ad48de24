"""adopt and gather_blocks: the ledger's ops: fingerprints of bytes that came without a forward, and the known facts
about a block of slots as one row."""

import torch
from torch import Tensor

from canary_core.ops import hashing
from canary_core.ops.blocks import BlockShape
from canary_core.ops.mapping import int64_words
from canary_core.ops.state import RegionState
from canary_core.ops.torch.stack import stacks
from canary_core.ops.torch.sums import keep_sums
from canary_core.records import (
    BLOCK_FLAGS,
    BLOCK_HASH,
    BLOCK_SLOT,
    BLOCK_SUM,
    BLOCK_VALUES,
    BLOCK_WHO,
    CONTENT,
    POSITION,
    PREFIX_HASH,
    STATES,
    TOKEN,
    WRITER,
    Block,
    State,
    Status,
)


def adopt(state: RegionState, slots: Tensor) -> None:
    """Between forwards: fingerprints ``slots`` (integer ``[n]``) with their present bytes. Numbers beyond the region
    are left out."""
    slot = slots.long()
    slot = slot[(slot >= 0) & (slot < state.region.slots)]
    if state.sources.sums:
        keep_sums(state, slot)
        return
    for stack in stacks(state):
        there = slot[stack.like.has_bytes(slot)]
        value, _ = stack.fold(state, there)
        state.fingerprints[there[:, None], stack.columns] = value.T


def gather_blocks(state: RegionState, slots: Tensor, block: BlockShape, rows: Tensor, first: int) -> None:
    """Between forwards: fills ``rows[first : first + n]`` (int64 ``[any, BLOCK_VALUES + sources]``, contiguous) with
    the block rows of ``n`` blocks, listed by ``slots`` (integer) in the form of `BlockShape`. `canary_core.records` has
    the layout. Numbers beyond the region add nothing."""
    page_slots = block.slots
    place = torch.arange(page_slots, device=slots.device)
    slot = slots.long()[:, None] * page_slots + place if block.paged else slots.long().view(-1, page_slots)
    usable = state.region.status_of(slot) == Status.OK
    safe = torch.where(usable, slot, 0)
    record = state.records[safe.flatten()]
    word, token, hash = record[:, POSITION].long(), record[:, TOKEN].long(), int64_words(record, PREFIX_HASH)
    word, token, hash = (x.view_as(slot) for x in (word, token, hash))
    position = word // STATES
    mix = torch.where(usable, hashing.mix(token, position), 0)
    told = usable & (word & CONTENT == State.WRITTEN) & (position == position[:, :1] + place)
    told &= position[:, :1] % page_slots == 0
    before = torch.where(place > 0, hash.roll(1, 1), 0)
    linked = usable & (hash != 0) & ((place == 0) | (hash == before + mix))
    value = torch.where(usable[..., None], state.fingerprints[safe], 0)  # [n, page_slots, sources]
    flags = told.all(1) * int(Block.TOKENS) + linked.all(1) * int(Block.PREFIX)
    flags += (value != 0).all(2).all(1) * int(Block.BYTES) + (~usable).any(1) * int(Block.OUTSIDE)
    out = rows[first : first + len(slot)]
    out[:, BLOCK_HASH] = torch.where(usable[:, -1], hash[:, -1], 0)
    out[:, BLOCK_SUM] = mix.sum(1)
    out[:, BLOCK_FLAGS] = flags
    out[:, BLOCK_SLOT] = slot[:, 0]
    who = (record[:, WRITER].long().view_as(slot) << 32) + position
    out[:, BLOCK_WHO] = torch.where(usable[:, 0], who[:, 0], 0)
    weight = state.sources.fingerprint_keys.places(page_slots, slot.device)
    out[:, BLOCK_VALUES:] = (value * weight[:, None]).sum(1)
