"""repair: the kernel of `canary_core.ops.torch.repair`. Rare, so it is written for one compilation for all sources of
all regions: layouts are read from the descriptors."""

import triton
import triton.language as tl
from torch import Tensor

from canary_core.ops.kernels.common import split_head
from canary_core.ops.kernels.launch import Launcher, arguments, jit, region_arguments
from canary_core.ops.kernels.words import (
    CLOCK_NEXT,
    CONTENT_BITS,
    FREED,
    PARKED,
    SOURCE_ADDRESS,
    SOURCE_CHUNK_BYTES,
    SOURCE_CHUNK_STRIDE,
    SOURCE_CHUNKS,
    SOURCE_FIELDS,
    SOURCE_PAGE_SIZE,
    SOURCE_PAGE_STRIDE,
    SOURCE_SLOT_STRIDE,
    STATE_VALUES,
    WRITTEN,
)
from canary_core.ops.repair_rows import MOST_FLIPPED_BITS, REPAIR_WORDS, RepairOutcome, RepairWord
from canary_core.ops.state import RegionState

TILE = 512
WARPS = 4

ROW = tl.constexpr(REPAIR_WORDS)
SLOT = tl.constexpr(int(RepairWord.SLOT))
SOURCE = tl.constexpr(int(RepairWord.SOURCE))
STORED = tl.constexpr(int(RepairWord.STORED))
FOUND = tl.constexpr(int(RepairWord.FOUND))
STEP_OF_WRITE = tl.constexpr(int(RepairWord.WRITTEN))
TOKEN_POSITION = tl.constexpr(int(RepairWord.POSITION))
OUTCOME = tl.constexpr(int(RepairWord.OUTCOME))
WORD = tl.constexpr(int(RepairWord.WORD))
OLD = tl.constexpr(int(RepairWord.OLD))
DAMAGED = tl.constexpr(int(RepairWord.DAMAGED))
STEP = tl.constexpr(int(RepairWord.STEP))
PUT = tl.constexpr(int(RepairOutcome.PUT))
REPAIRED = tl.constexpr(int(RepairOutcome.REPAIRED))
FAILED = tl.constexpr(int(RepairOutcome.FAILED))
LIVE = tl.constexpr(int(RepairOutcome.LIVE))
MOVED_ON = tl.constexpr(int(RepairOutcome.MOVED_ON))
CHANGED = tl.constexpr(int(RepairOutcome.CHANGED))
UNCLEAR = tl.constexpr(int(RepairOutcome.UNCLEAR))
MOST_BITS = tl.constexpr(MOST_FLIPPED_BITS)


def repair(state: RegionState, asked: Tensor) -> None:
    """As `canary_core.ops.torch.repair.repair`. Two launches: what the first one has written, the second one reads."""
    launchers = [state.launches.by_op.get(name) for name in ("repair", "prove")]
    if None in launchers:
        sources = state.sources
        tensors = sources.descriptors, sources.keys, sources.salts, state.fingerprints
        fixed = (region_arguments(state), arguments(*tensors, len(sources)))
        for name, kernel in (("repair", repair_kernel), ("prove", prove_kernel)):
            state.launches.by_op[name] = Launcher(kernel, state, fixed, {"TILE": TILE}, num_warps=WARPS)
        launchers = [state.launches.by_op[name] for name in ("repair", "prove")]
    given = arguments(asked, asked.shape[0])
    for launcher in launchers:
        if launcher is not None:
            launcher((max(asked.shape[0], 1), 1), given)


@jit("sources", "count")
def repair_kernel(
    region, p_descriptors, p_keys, p_salts, p_fingerprints, sources, p_asked, count,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: a program for each row of ``p_asked``. Finds the word and writes the old one."""
    i_row = tl.program_id(0)
    if i_row < count:
        p_row = p_asked + i_row.to(tl.int64) * ROW
        slot, column = tl.load(p_row + SLOT), tl.load(p_row + SOURCE)
        stored, found = tl.load(p_row + STORED), tl.load(p_row + FOUND)
        _token, place = split_head(tl.load(region.p_records + slot * 4))
        written = tl.load(region.p_records + slot * 4 + 2) & 0xFFFFFFFF
        same = ((place & (CONTENT_BITS | FREED)) == WRITTEN) & (
            place // STATE_VALUES == tl.load(p_row + TOKEN_POSITION)
        )
        same = same & (written == tl.load(p_row + STEP_OF_WRITE))
        same = same & (tl.load(p_fingerprints + slot * sources + column) == stored)
        outcome = tl.where(same, tl.where((place & PARKED) != 0, CHANGED, LIVE), MOVED_ON).to(tl.int64)
        word = tl.full((), -1, tl.int64)
        old = tl.zeros((), tl.int64)
        damaged = tl.zeros((), tl.int64)
        if outcome == CHANGED:
            p_source = p_descriptors + column * SOURCE_FIELDS
            salt = tl.load(p_salts + column)
            if fingerprint(p_source, p_keys, salt, slot, TILE) == found:
                word, old, damaged, fits = explained(p_source, p_keys, stored - found, slot, TILE)
                outcome = tl.full((), UNCLEAR, tl.int64)
                if (fits == 1) & is_flip((old ^ damaged).to(tl.uint32)):
                    p_word = word_at(p_source, slot, word).to(tl.pointer_type(tl.int32))
                    before = tl.atomic_cas(p_word, damaged.to(tl.int32), old.to(tl.int32))
                    outcome = tl.where(before == damaged.to(tl.int32), PUT, CHANGED).to(tl.int64)
        done = outcome == PUT
        tl.store(p_row + WORD, tl.where(done, word, -1))
        tl.store(p_row + OLD, tl.where(done, old, 0))
        tl.store(p_row + DAMAGED, tl.where(done, damaged, 0))
        tl.store(p_row + STEP, tl.load(region.p_clock + CLOCK_NEXT))
        tl.store(p_row + OUTCOME, outcome)


@jit("sources", "count")
def prove_kernel(
    region, p_descriptors, p_keys, p_salts, p_fingerprints, sources, p_asked, count,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: as `repair_kernel`, whose result is proven, or undone."""
    i_row = tl.program_id(0)
    if i_row < count:
        p_row = p_asked + i_row.to(tl.int64) * ROW
        if tl.load(p_row + OUTCOME) == PUT:
            slot, column, word = tl.load(p_row + SLOT), tl.load(p_row + SOURCE), tl.load(p_row + WORD)
            p_source = p_descriptors + column * SOURCE_FIELDS
            value = fingerprint(p_source, p_keys, tl.load(p_salts + column), slot, TILE)
            outcome = tl.full((), REPAIRED, tl.int64)
            if value != tl.load(p_row + STORED):
                p_word = word_at(p_source, slot, word).to(tl.pointer_type(tl.int32))
                old, damaged = tl.load(p_row + OLD).to(tl.int32), tl.load(p_row + DAMAGED).to(tl.int32)
                tl.atomic_cas(p_word, old, damaged)
                outcome = tl.full((), FAILED, tl.int64)
            tl.store(p_row + OUTCOME, outcome)


@triton.jit
def word_at(p_source, slot, o_word):
    """Address of words of a slot."""
    page_size = tl.load(p_source + SOURCE_PAGE_SIZE)
    chunk_words = tl.load(p_source + SOURCE_CHUNK_BYTES) // 4
    first = tl.load(p_source + SOURCE_ADDRESS) + slot // page_size * tl.load(p_source + SOURCE_PAGE_STRIDE)
    first += slot % page_size * tl.load(p_source + SOURCE_SLOT_STRIDE)
    return first + o_word // chunk_words * tl.load(p_source + SOURCE_CHUNK_STRIDE) + o_word % chunk_words * 4


@triton.jit
def load_tile(p_source, p_keys, slot, o_word, words):
    """Words of a slot and their keys, uint64; 0 beyond the slot's end."""
    m = o_word < words
    p_word = word_at(p_source, slot, o_word).to(tl.pointer_type(tl.uint32))
    key = tl.load(p_keys + o_word, mask=m, other=1).to(tl.uint64, bitcast=True)
    return tl.load(p_word, mask=m, other=0).to(tl.uint64), key, m


@triton.jit
def fingerprint(p_source, p_keys, salt, slot, TILE: tl.constexpr):
    """The slot's fingerprint in the source, int64."""
    words = tl.load(p_source + SOURCE_CHUNKS) * (tl.load(p_source + SOURCE_CHUNK_BYTES) // 4)
    total = tl.zeros((TILE,), tl.uint64)
    for w in range(0, words, TILE):
        word, key, _m = load_tile(p_source, p_keys, slot, w + tl.arange(0, TILE), words)
        total += word * key
    return salt + tl.sum(total, 0).to(tl.int64, bitcast=True)


@triton.jit
def explained(p_source, p_keys, difference, slot, TILE: tl.constexpr):
    """The word that can have changed alone, if there is one: its index, the word before and now, and how many words
    can."""
    words = tl.load(p_source + SOURCE_CHUNKS) * (tl.load(p_source + SOURCE_CHUNK_BYTES) // 4)
    change = difference.to(tl.uint64, bitcast=True)
    place = tl.full((), -1, tl.int64)
    before = tl.zeros((), tl.int64)
    now = tl.zeros((), tl.int64)
    fits = tl.zeros((), tl.int32)
    for w in range(0, words, TILE):
        o_word = w + tl.arange(0, TILE)
        word, key, m = load_tile(p_source, p_keys, slot, o_word, words)
        inverse = key
        for _ in tl.static_range(5):
            inverse = inverse * (2 - key * inverse)
        old = word + change * inverse
        m_fit = m & ((old >> 32) == 0)
        fits += tl.sum(m_fit.to(tl.int32), 0)
        place = tl.maximum(place, tl.max(tl.where(m_fit, o_word, -1), 0).to(tl.int64))
        before = tl.maximum(before, tl.max(tl.where(m_fit, old.to(tl.int64), 0), 0))
        now = tl.maximum(now, tl.max(tl.where(m_fit, word.to(tl.int64), 0), 0))
    return place, before, now, fits


@triton.jit
def is_flip(changed):
    """Whether few bits of a word differ, or bits of one byte."""
    pairs = changed - ((changed >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    bits = (eights & 0xFF) + ((eights >> 8) & 0xFF) + ((eights >> 16) & 0xFF) + (eights >> 24)
    used = ((changed & 0xFF) != 0).to(tl.int32) + ((changed & 0xFF00) != 0).to(tl.int32)
    used += ((changed & 0xFF0000) != 0).to(tl.int32) + ((changed & 0xFF000000) != 0).to(tl.int32)
    return (bits <= MOST_BITS) | (used == 1)
