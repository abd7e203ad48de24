"""compare_kv: the kernel of `canary_core.ops.torch.compare_kv`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from canary_core.ops.kernels.launch import MOST_PROGRAMS, Launcher, arguments, jit
from canary_core.ops.kernels.words import (
    SOURCE_ADDRESS,
    SOURCE_CHUNK_BYTES,
    SOURCE_CHUNK_STRIDE,
    SOURCE_CHUNKS,
    SOURCE_FIELDS,
    SOURCE_PAGE_SIZE,
    SOURCE_PAGE_STRIDE,
    SOURCE_PRESENT,
    SOURCE_SLOT_STRIDE,
)
from canary_core.ops.sources import descriptor, type_of
from canary_core.ops.state import RegionState
from canary_core.ops.upload import upload
from canary_core.recomputer import Computed
from canary_core.region import KVSource

TILE = 16
"""Tokens of one source taken together by a program."""
LANES = 64
"""As in the reference: part of what is computed."""
WARPS = 4
LARGEST = tl.constexpr(3.4028234663852886e38)

E4M3 = tl.constexpr(tl.float8e4nv)
E5M2 = tl.constexpr(tl.float8e5)

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
}


def compare_kv(state: RegionState, columns: Sequence[int], slots: Tensor, computed: Computed, out: Tensor) -> None:
    """As `canary_core.ops.torch.compare_kv.compare_kv`. One launch for each pair of element types. Never captured: the
    descriptors are uploaded."""
    tokens = slots.shape[0]
    if not tokens or not columns:
        return
    held = [state.region.sources[column] for column in columns]
    device = state.records.device
    rows = [word for source in (*held, *computed.sources) for word in descriptor(source, non_finite=False)]
    descriptors = upload(rows, device)
    types = [(_type(a), _type(b)) for a, b in zip(held, computed.sources, strict=True)]
    for pair in dict.fromkeys(types):
        places = upload([i for i, types_of in enumerate(types) if types_of == pair], device)
        key = f"compare_kv {pair}"
        launcher = state.launches.by_op.get(key)
        if launcher is None:
            (held_type, held_scale), (type_again, scale_again) = pair
            constants = {
                "HELD": held_type, "HELD_SCALE": held_scale, "COMPUTED": type_again, "COMPUTED_SCALE": scale_again,
                "TILE": TILE, "LANES": LANES,
            }  # fmt: skip
            # A fused multiplication and addition rounds once, and gives other bits than the reference.
            launcher = Launcher(compare_kv_kernel, state, (), constants, num_warps=WARPS, enable_fp_fusion=False)
            state.launches.by_op[key] = launcher
        given = arguments(
            descriptors, places, slots.long(), computed.slots.long(), out, out.stride(0), out.stride(1), len(columns),
            tokens,
        )  # fmt: skip
        launcher((len(places), min(-(-tokens // TILE), MOST_PROGRAMS)), given)


def _type(source: KVSource) -> tuple[tl.dtype, int]:
    """The type of its numbers, and bytes of the scale at the end of each chunk."""
    dtype = type_of(source)
    if dtype not in _TYPES or dtype is None:
        raise TypeError(f"{source.name}: numbers of {dtype} can't be compared")
    return _TYPES[dtype], 4 * (source.scaled is not None)


@triton.jit
def loaded(p_byte, m, TYPE: tl.constexpr):
    """Numbers at addresses, as float32. Those of eight bits are decoded here: not all devices and interpreters do."""
    # One return: Triton compiles what follows another.
    if TYPE == E5M2:
        # The upper half of a float16.
        bits = tl.load(p_byte.to(tl.pointer_type(tl.uint8)), mask=m, other=0).to(tl.uint16)
        found = (bits << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif TYPE == E4M3:
        # A float16 with an exponent less by 8, in which small numbers are exact, too.
        bits = tl.load(p_byte.to(tl.pointer_type(tl.uint8)), mask=m, other=0).to(tl.uint16)
        half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        found = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    else:
        found = tl.load(p_byte.to(tl.pointer_type(TYPE)), mask=m, other=0).to(tl.float32)
    return found


@triton.jit
def numbers(p_source, slot, m_slot, o_lane, TYPE: tl.constexpr, SCALE: tl.constexpr):
    """Numbers ``o_lane`` of the source at each slot, float32 ``[TILE, LANES]``, times the scale in the last ``SCALE``
    bytes of their chunk, if any."""
    page_size = tl.load(p_source + SOURCE_PAGE_SIZE)
    chunk_bytes = tl.load(p_source + SOURCE_CHUNK_BYTES) - SCALE
    first = tl.load(p_source + SOURCE_ADDRESS) + slot // page_size * tl.load(p_source + SOURCE_PAGE_STRIDE)
    first += slot % page_size * tl.load(p_source + SOURCE_SLOT_STRIDE)
    o_byte = o_lane * (TYPE.primitive_bitwidth // 8)
    chunk = o_byte // chunk_bytes * tl.load(p_source + SOURCE_CHUNK_STRIDE)
    m = m_slot[:, None] & (o_byte < chunk_bytes * tl.load(p_source + SOURCE_CHUNKS))[None, :]
    found = loaded(first[:, None] + (chunk + o_byte % chunk_bytes)[None, :], m, TYPE)
    if SCALE:
        found = found * loaded(first[:, None] + (chunk + chunk_bytes)[None, :], m, tl.float32)
    return found  # [TILE, LANES]


@triton.jit
def has_bytes(p_source, slot):
    """Whether each slot has bytes in the source."""
    return (slot >= 0) & (slot % tl.load(p_source + SOURCE_PAGE_SIZE) < tl.load(p_source + SOURCE_PRESENT))


@triton.jit
def added_up(total, TILE: tl.constexpr, LANES: tl.constexpr):
    """The sum of each row of `LANES`, neighbours first, in the order of the reference."""
    tl.static_assert(LANES == 64)
    a, b = tl.split(tl.reshape(total, [TILE, 32, 2]))
    a, b = tl.split(tl.reshape(a + b, [TILE, 16, 2]))
    a, b = tl.split(tl.reshape(a + b, [TILE, 8, 2]))
    a, b = tl.split(tl.reshape(a + b, [TILE, 4, 2]))
    a, b = tl.split(tl.reshape(a + b, [TILE, 2, 2]))
    a, b = tl.split(a + b)
    return a + b


@jit("out_half", "out_source", "sources", "tokens")
def compare_kv_kernel(
    p_descriptors, p_places, p_slots, p_computed, p_out, out_half, out_source, sources, tokens,
    HELD: tl.constexpr, HELD_SCALE: tl.constexpr, COMPUTED: tl.constexpr, COMPUTED_SCALE: tl.constexpr,
    TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Grid: pairs of sources, times any number of programs over tiles of tokens."""
    i_source = tl.load(p_places + tl.program_id(0))
    p_held = p_descriptors + i_source * SOURCE_FIELDS
    p_again = p_descriptors + (sources + i_source) * SOURCE_FIELDS
    number_bytes = tl.load(p_held + SOURCE_CHUNK_BYTES) - HELD_SCALE
    elements = tl.load(p_held + SOURCE_CHUNKS) * number_bytes // (HELD.primitive_bitwidth // 8)
    for i in range(tl.program_id(1), (tokens + TILE - 1) // TILE, tl.num_programs(1)):
        o_token = i * TILE + tl.arange(0, TILE).to(tl.int64)
        m_token = o_token < tokens
        slot = tl.load(p_slots + o_token, mask=m_token, other=-1)
        other = tl.load(p_computed + o_token, mask=m_token, other=-1)
        m = has_bytes(p_held, slot) & has_bytes(p_again, other)
        apart = tl.zeros([TILE, LANES], tl.float32)
        size = tl.zeros([TILE, LANES], tl.float32)
        for first in range(0, elements, LANES):
            o_lane = first + tl.arange(0, LANES).to(tl.int64)
            held = numbers(p_held, slot, m, o_lane, HELD, HELD_SCALE)
            again = numbers(p_again, other, m, o_lane, COMPUTED, COMPUTED_SCALE)
            finite, finite_too = tl.abs(held) <= LARGEST, tl.abs(again) <= LARGEST
            both = finite & finite_too
            difference = tl.where(both, held, 0.0) - tl.where(both, again, 0.0)
            difference = tl.where(finite != finite_too, float("inf"), difference)
            again = tl.where(both, again, 0.0)
            apart += difference * difference
            size += again * again
        p_row = p_out + i_source * out_source + o_token
        tl.store(p_row, added_up(apart, TILE, LANES), mask=m_token)
        tl.store(p_row + out_half, added_up(size, TILE, LANES), mask=m_token)
