"""What the memory itself gives for the rows of a case: the same bytes in the same order, read and nothing else.

Random rows don't reach the speed of a long read. A kernel that looks up slots, loads their bytes and their fingerprints
and adds them up without looking at them is the floor of `read_check`; the best of a few tile sizes counts.
"""

import itertools

import torch
import triton
import triton.language as tl

from benchmarks.setting import Setting
from benchmarks.timing import time_graph
from canary_core.region import KVSource

TILES = tuple(itertools.product((16, 32), (16, 32), (2, 4), (16, 32)))
"""Slots a program takes at a time, words of a slot in one load, loads in flight, programs a multiprocessor."""


def gather_us(setting: Setting, budget_s: float) -> float:
    """Microseconds to read all slots in the cache and their fingerprints once, in the requests' order."""
    page_size = setting.traffic.page_size
    entries = setting.traffic.entries[:, : setting.case.shape.context_tokens // page_size].reshape(-1)
    slots = entries.numel() * page_size
    out = torch.empty(slots, dtype=torch.int64, device=entries.device)
    processors = torch.cuda.get_device_properties(entries.device).multi_processor_count
    wide, *narrow = setting.state.sources
    strips = (*_strip(wide), *_strip(narrow[0] if narrow else wide))
    best = float("inf")
    for slots_a_tile, words, unroll, programs in TILES:

        def launch(tile: tuple[int, int, int] = (slots_a_tile, words, unroll), programs: int = programs) -> None:
            gather_kernel[(processors * programs,)](
                entries, setting.state.fingerprints, out, slots, setting.state.sources.columns, strips[0], strips[6],
                PAGE_SIZE=page_size, STRIPS=strips[1:6] + strips[7:], NARROW=strips[11] if narrow else 0, TILE=tile[0],
                BLOCK=tile[1], UNROLL=tile[2], num_warps=1,
            )  # fmt: skip

        best = min(best, time_graph(launch, 1, None, budget_s / len(TILES)).us)
    return best


def _strip(source: KVSource) -> tuple[int, ...]:
    """Address, and what else says where a slot's words lie: page size, strides of page, slot and chunk in words,
    words."""
    if source.alignment < 4 or (source.chunks > 1 and source.chunk_bytes != 256):
        raise ValueError(f"{source.name}: no gather for chunks of {source.chunk_bytes} bytes")
    return (
        source.address, source.page_size, source.page_stride_bytes // 4, source.slot_stride_bytes // 4,
        source.chunk_stride_bytes // 4 if source.chunks > 1 else 0, source.chunks * source.chunk_bytes // 4,
    )  # fmt: skip


@triton.jit
def gather_kernel(  # noqa: PLR0913 - a kernel's arguments
    p_entries, p_fingerprints, p_out, slots, sources, wide, narrow,
    PAGE_SIZE: tl.constexpr, STRIPS: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tiles of `TILE` slots. `STRIPS`: two `_strip`s without their address; `NARROW`
    words in the second."""
    for i in range(tl.program_id(0), (slots + TILE - 1) // TILE, tl.num_programs(0)):
        o_slot = i * TILE + tl.arange(0, TILE)
        m = o_slot < slots
        entry = tl.load(p_entries + o_slot // PAGE_SIZE, mask=m, other=0).to(tl.int64)
        slot = entry * PAGE_SIZE + o_slot % PAGE_SIZE
        found = tl.load(p_fingerprints + slot * sources, mask=m, other=0)
        if NARROW:
            found += tl.load(p_fingerprints + slot * sources + 1, mask=m, other=0)
            first = slot // STRIPS[5] * STRIPS[6] + slot % STRIPS[5] * STRIPS[7]
            p_words = tl.multiple_of(narrow, 8).to(tl.pointer_type(tl.uint32))
            for w in tl.static_range(NARROW):
                found += tl.load(p_words + first + w, mask=m, other=0)
        first = slot // STRIPS[0] * STRIPS[1] + slot % STRIPS[0] * STRIPS[2]
        p_words = tl.multiple_of(wide, 16).to(tl.pointer_type(tl.uint32))
        total = tl.zeros((TILE, BLOCK), tl.uint32)
        for w in range(0, STRIPS[4], BLOCK * UNROLL):
            for u in tl.static_range(UNROLL):
                o_word = w + u * BLOCK + tl.arange(0, BLOCK)
                offset = o_word
                if STRIPS[3] > 0:
                    offset = o_word // 64 * STRIPS[3] + o_word % 64
                p_word = p_words + tl.multiple_of(first, 4)[:, None] + offset[None, :]
                there = m[:, None] & (o_word < STRIPS[4])[None, :]
                total += tl.load(p_word, mask=there, other=0, eviction_policy="evict_first")
        tl.store(p_out + o_slot, found + tl.sum(total, 1), mask=m)
