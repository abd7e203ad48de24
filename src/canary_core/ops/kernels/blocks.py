"""adopt and gather_blocks: the kernels of `canary_core.ops.torch.blocks`."""

import triton
import triton.language as tl
from torch import Tensor

from canary_core.ops.blocks import BlockShape
from canary_core.ops.kernels.common import GOLDEN, MULTIPLY_1, MULTIPLY_2, mix, split_head
from canary_core.ops.kernels.fold import keep, tile_of
from canary_core.ops.kernels.launch import Launcher, arguments, jit, launch_over, region_arguments
from canary_core.ops.kernels.tiles import SCRUB_TILES
from canary_core.ops.kernels.words import CONTENT_BITS, STATE_VALUES, WRITTEN
from canary_core.ops.state import RegionState
from canary_core.records import BLOCK_FLAGS, BLOCK_HASH, BLOCK_SLOT, BLOCK_SUM, BLOCK_VALUES, BLOCK_WHO, Block

SLOT_TILE = 16
"""Slots of a block taken at a time by a program."""

SOURCE_TILE = 64
"""Sources whose fingerprints are taken at a time by a program."""

WARPS = 4

VALUES = tl.constexpr(BLOCK_VALUES)
WORD_HASH = tl.constexpr(BLOCK_HASH)
WORD_SUM = tl.constexpr(BLOCK_SUM)
WORD_FLAGS = tl.constexpr(BLOCK_FLAGS)
WORD_SLOT = tl.constexpr(BLOCK_SLOT)
WORD_WHO = tl.constexpr(BLOCK_WHO)
FLAG_TOKENS = tl.constexpr(int(Block.TOKENS))
FLAG_PREFIX = tl.constexpr(int(Block.PREFIX))
FLAG_BYTES = tl.constexpr(int(Block.BYTES))
FLAG_OUTSIDE = tl.constexpr(int(Block.OUTSIDE))


def adopt(state: RegionState, slots: Tensor) -> None:
    """As `canary_core.ops.torch.blocks.adopt`. One launch a source group."""
    launch_over(state, "adopt", adopt_kernel, SCRUB_TILES, slots)


def gather_blocks(state: RegionState, slots: Tensor, block: BlockShape, rows: Tensor, first: int) -> None:
    """As `canary_core.ops.torch.blocks.gather_blocks`. One launch."""
    blocks = block.blocks(slots.shape[0])
    if not blocks:
        return
    op = "gather_pages" if block.paged else "gather_blocks"
    launcher = state.launches.by_op.get(op)
    if launcher is None:
        sources = arguments(state.fingerprints, state.fingerprints.shape[1], state.sources.place_seed)
        fixed = (region_arguments(state), sources)
        constants = {"PAGED": block.paged, "SLOT_TILE": SLOT_TILE, "SOURCE_TILE": SOURCE_TILE}
        launcher = Launcher(gather_blocks_kernel, state, fixed, constants, num_warps=WARPS)
        state.launches.by_op[op] = launcher
    launcher((blocks, 1), arguments(slots, block.slots, rows, first))


@jit("count")
def adopt_kernel(region, sources, p_slots, count, BYTES: tl.constexpr):
    """Grid: any number of programs over tiles of `SLOTS` of the listed slots, by groups of sources."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    for i in range(tl.program_id(1), (count + SLOTS - 1) // SLOTS, tl.num_programs(1)):
        o_slot = tile_of(i, BYTES)
        slot = tl.load(p_slots + o_slot, mask=o_slot < count, other=-1).to(tl.int64)
        inside = (slot >= 0) & (slot < region.slots)
        keep(sources, sources.p_fingerprints, slot, inside, BYTES)


@jit("page_slots", "first")
def gather_blocks_kernel(
    region, p_fingerprints, sources, p_seed, p_slots, page_slots, p_rows, first,
    PAGED: tl.constexpr, SLOT_TILE: tl.constexpr, SOURCE_TILE: tl.constexpr,
):  # fmt: skip
    """Grid: one program for each block."""
    i_block = tl.program_id(0).to(tl.int64)
    p_block = p_slots + (i_block if PAGED else i_block * page_slots)
    p_row = p_rows + (first + i_block) * (VALUES + sources)
    begin = tl.load(p_block).to(tl.int64)
    if PAGED:
        begin *= page_slots
    m_begin = is_live(region, begin)
    # The first slot's position, where it is one.
    _, word_first = split_head(tl.load(region.p_records + begin * 4, mask=m_begin, other=0))
    position_first = word_first // STATE_VALUES
    # The high half of the word with step and writer.
    writer_first = tl.load(region.p_records + begin * 4 + 2, mask=m_begin, other=0) >> 32
    odd_tokens = tl.where(position_first % page_slots == 0, 0, 1)
    odd_prefix = odd_tokens * 0
    outside = odd_tokens * 0
    total = tl.zeros((), tl.int64)
    for i in range(0, page_slots, SLOT_TILE):
        o_place = i + tl.arange(0, SLOT_TILE)
        m = o_place < page_slots
        slot, usable = listed(region, p_block, begin, o_place, m, PAGED)
        before, m_before = listed(region, p_block, begin, o_place - 1, m & (o_place > 0), PAGED)
        token, word = split_head(tl.load(region.p_records + slot * 4, mask=usable, other=0))
        hash = tl.load(region.p_records + slot * 4 + 1, mask=usable, other=0)
        hash_before = tl.load(region.p_records + before * 4 + 1, mask=m_before, other=0)
        position = word // STATE_VALUES
        grown = tl.where(usable, mix(token, position), 0)
        told = usable & ((word & CONTENT_BITS) == WRITTEN) & (position == position_first + o_place)
        linked = usable & (hash != 0) & ((o_place == 0) | (m_before & (hash == hash_before + grown)))
        odd_tokens += tl.sum((m & (told == 0)).to(tl.int32), 0)
        odd_prefix += tl.sum((m & (linked == 0)).to(tl.int32), 0)
        outside += tl.sum((m & (usable == 0)).to(tl.int32), 0)
        total += tl.sum(grown, 0)
        tl.store(p_row + WORD_HASH + tl.zeros_like(slot), hash, mask=m & (o_place == page_slots - 1))
    unknown = outside * 0
    seed = tl.load(p_seed)
    for s in range(0, sources, SOURCE_TILE):
        o_source = s + tl.arange(0, SOURCE_TILE)
        value = tl.zeros((SOURCE_TILE,), tl.uint64)
        for i in range(0, page_slots, SLOT_TILE):
            o_place = i + tl.arange(0, SLOT_TILE)
            m = o_place < page_slots
            slot, usable = listed(region, p_block, begin, o_place, m, PAGED)
            m_value = usable[:, None] & (o_source < sources)[None, :]
            p_value = p_fingerprints + slot[:, None] * sources + o_source[None, :]
            found = tl.load(p_value, mask=m_value, other=0)
            missing = (found == 0) & m[:, None] & (o_source < sources)[None, :]
            unknown += tl.sum(tl.sum(missing.to(tl.int32), 1), 0)
            value += tl.sum(found.to(tl.uint64, bitcast=True) * weight(seed, o_place)[:, None], 0)
        tl.store(p_row + VALUES + o_source, value.to(tl.int64, bitcast=True), mask=o_source < sources)
    flags = tl.where(odd_tokens > 0, 0, FLAG_TOKENS) + tl.where(odd_prefix > 0, 0, FLAG_PREFIX)
    flags += tl.where(unknown > 0, 0, FLAG_BYTES) + tl.where(outside > 0, FLAG_OUTSIDE, 0)
    tl.store(p_row + WORD_SUM, total)
    tl.store(p_row + WORD_SLOT, begin)
    tl.store(p_row + WORD_WHO, (writer_first << 32) + position_first)
    tl.store(p_row + WORD_FLAGS, flags.to(tl.int64))


@triton.jit
def listed(region, p_block, begin, o_place, m, PAGED: tl.constexpr):
    """The slots at places of a block, and whether each is a live slot of the region."""
    slot = tl.where(m, begin + o_place, -1)
    if not PAGED:
        slot = tl.load(p_block + o_place, mask=m, other=-1).to(tl.int64)
    return slot, is_live(region, slot)


@triton.jit
def is_live(region, slot):
    """Whether each number is that of a slot of the region, and of no null slot."""
    return (slot >= 0) & (slot < region.slots) & ((slot < region.null_first) | (slot >= region.null_end))


@triton.jit
def weight(seed, o_place):
    """`hashing.weights` of places in a block; uint64."""
    x = o_place.to(tl.uint64) + seed.to(tl.uint64, bitcast=True) + GOLDEN
    x = (x ^ (x >> 30)) * MULTIPLY_1
    x = (x ^ (x >> 27)) * MULTIPLY_2
    return (x ^ (x >> 31)) | 1
