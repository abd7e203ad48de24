"""compare_weights: the kernel of `canary_core.ops.torch.weights`."""

import triton
import triton.language as tl

from canary_core.ops.kernels.launch import Launcher, arguments, jit, programs
from canary_core.ops.state import RegionState
from canary_core.ops.weights import CHUNK_BYTES, ROOM, Different, RangeWord, WeightTable

WORDS = 2048
"""Words loaded at a time."""
WARPS = 4
PER_PROCESSOR = 8
"""Programs a multiprocessor."""

PLACE = tl.constexpr(len(RangeWord))
PLACE_ADDRESS = tl.constexpr(int(RangeWord.ADDRESS))
PLACE_BYTES = tl.constexpr(int(RangeWord.BYTES))
PLACE_FIRST = tl.constexpr(int(RangeWord.FIRST))
PLACE_CHUNK_BYTES = tl.constexpr(int(RangeWord.CHUNK_BYTES))
DIFFERENT = tl.constexpr(len(Different))
DIFFERENT_CHUNK = tl.constexpr(int(Different.CHUNK))
DIFFERENT_FINGERPRINT = tl.constexpr(int(Different.FINGERPRINT))
ROWS = tl.constexpr(ROOM)
SALT = tl.constexpr(CHUNK_BYTES // 4)
"""Place of the salt, behind the keys."""


def compare_weights(state: RegionState, table: WeightTable, first: int, count: int) -> None:
    """As `canary_core.ops.torch.weights.compare_weights`. One launch."""
    launcher = table.launches.get("compare_weights")
    if launcher is None:
        fixed = (arguments(table.places, table.owners, table.fingerprints, table.found, table.keys),)
        launcher = Launcher(compare_weights_kernel, state, fixed, {"WORDS": WORDS}, num_warps=WARPS)
        table.launches["compare_weights"] = launcher
    launcher((max(min(count, programs(state, PER_PROCESSOR)), 1), 1), arguments(first, count))


@jit("first", "count")
def compare_weights_kernel(
    p_places, p_owners, p_fingerprints, p_found, p_keys, first, count,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over the chunks."""
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        chunk = first + i
        p_place = p_places + tl.load(p_owners + chunk).to(tl.int64) * PLACE
        chunk_bytes = tl.load(p_place + PLACE_CHUNK_BYTES)
        begin = (chunk - tl.load(p_place + PLACE_FIRST)) * chunk_bytes
        size = tl.maximum(tl.minimum(tl.load(p_place + PLACE_BYTES) - begin, chunk_bytes), 0).to(tl.int32)
        value = fold(tl.load(p_place + PLACE_ADDRESS) + begin, size, p_keys, WORDS)
        stored = tl.load(p_fingerprints + chunk)
        if stored == 0:
            tl.store(p_fingerprints + chunk, value)
        elif stored != value:
            row = tl.atomic_add(p_found, 1)
            if row < ROWS:
                p_row = p_found + (1 + row) * DIFFERENT
                tl.store(p_row + DIFFERENT_CHUNK, chunk.to(tl.int64))
                tl.store(p_row + DIFFERENT_FINGERPRINT, value)


@triton.jit
def fold(address, size, p_keys, WORDS: tl.constexpr):
    """Fingerprint of ``size`` bytes from ``address`` on; int64."""
    total = tl.zeros((WORDS,), tl.uint64)
    whole = size // 4
    if address % 16 == 0:
        p_words = tl.multiple_of(tl.multiple_of(address, 16).to(tl.pointer_type(tl.uint32)), 16)
        for w in range(0, whole, WORDS):
            o_word = w + tl.arange(0, WORDS)
            m = o_word < whole
            word = tl.load(p_words + o_word, mask=m, other=0, eviction_policy="evict_first")
            key = tl.load(p_keys + o_word, mask=m, other=0)
            total += word.to(tl.uint64) * key.to(tl.uint64, bitcast=True)
    else:
        for w in range(0, whole, WORDS):
            o_word = w + tl.arange(0, WORDS)
            m = o_word < whole
            key = tl.load(p_keys + o_word, mask=m, other=0)
            total += bytes_of(address, o_word, m, 4).to(tl.uint64) * key.to(tl.uint64, bitcast=True)
    if size % 4 > 0:
        # The last word is short.
        o_last = whole + tl.arange(0, WORDS)
        m = o_last == whole
        key = tl.load(p_keys + o_last, mask=m, other=0)
        total += bytes_of(address, o_last, m, size % 4).to(tl.uint64) * key.to(tl.uint64, bitcast=True)
    return tl.sum(total, 0).to(tl.int64, bitcast=True) + tl.load(p_keys + SALT)


@triton.jit
def bytes_of(address, o_word, m, length):
    """Words of ``length`` bytes, made of bytes: uint32."""
    p_byte = address.to(tl.pointer_type(tl.uint8)) + o_word * 4
    word = tl.zeros_like(o_word).to(tl.uint32)
    for b in tl.static_range(4):
        word = word | (tl.load(p_byte + b, mask=m & (b < length), other=0).to(tl.uint32) << (8 * b))
    return word
