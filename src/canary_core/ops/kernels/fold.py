"""The fingerprint of a tile: places of a slot's bytes in a source, their loads, and their sum.

The rows of a tile are slots of one source, or sources abreast of one long slot; in the latter case a source's
description is a block (see `tiles.Tile`).

The inner loop is a masked 16-byte load, a widening multiply and an add per 4 bytes: memory is the limit, not
arithmetic.
"""

import triton
import triton.language as tl

from canary_core.ops.kernels.fields import Source
from canary_core.ops.kernels.words import (
    SOURCE_ADDRESS,
    SOURCE_CARRY,
    SOURCE_CHUNK_BYTES,
    SOURCE_CHUNK_STRIDE,
    SOURCE_CHUNKS,
    SOURCE_EXPONENT,
    SOURCE_FIELDS,
    SOURCE_INCREMENT,
    SOURCE_PAGE_STRIDE,
    SOURCE_PRESENT,
    SOURCE_SLOT_STRIDE,
)


@triton.jit
def describe(sources, S: tl.constexpr, BYTES: tl.constexpr):
    """The `S`-th of the sources that this program takes together, as a `fields.Source`. Beyond the last one of sources
    abreast no slot has bytes."""
    N: tl.constexpr = len(BYTES.STRIPS)
    if BYTES.ABREAST > 0:
        o_source = tl.program_id(0) * BYTES.ABREAST + tl.arange(0, BYTES.ABREAST)
        source = described(sources, tl.load(sources.p_columns + tl.minimum(o_source, BYTES.SOURCES - 1) * N + S))
        present = tl.where(o_source < BYTES.SOURCES, source.present, 0)
        source = Source(
            column=source.column, salt=source.salt, address=source.address, page_stride=source.page_stride,
            slot_stride=source.slot_stride, chunk_stride=source.chunk_stride, present=present, words=source.words,
        )  # fmt: skip
    elif BYTES.PARTS > 0:
        source = part(sources, 0, BYTES)
    else:
        source = described(sources, tl.load(sources.p_columns + tl.program_id(0) * N + S))
    return source


@triton.jit
def described(sources, column):
    """The source, or the block of sources, with this index."""
    p_source = sources.p_descriptors + column * SOURCE_FIELDS
    chunk_words = (tl.load(p_source + SOURCE_CHUNK_BYTES) + 3) // 4
    words = (tl.load(p_source + SOURCE_CHUNKS) * chunk_words).to(tl.int32)
    salt, address = tl.load(sources.p_salts + column), tl.load(p_source + SOURCE_ADDRESS)
    page = tl.load(p_source + SOURCE_PAGE_STRIDE)
    slot = tl.load(p_source + SOURCE_SLOT_STRIDE)
    chunk = tl.load(p_source + SOURCE_CHUNK_STRIDE)
    present = tl.load(p_source + SOURCE_PRESENT)
    return Source(
        column=column, salt=salt, address=address, page_stride=page, slot_stride=slot, chunk_stride=chunk,
        present=present, words=words,
    )  # fmt: skip


@triton.jit
def group(sources, BYTES: tl.constexpr):
    """Number of the program's group of sources that share fingerprints."""
    return tl.load(sources.p_columns + tl.program_id(0) * (BYTES.PARTS + 1))


@triton.jit
def part(sources, i, BYTES: tl.constexpr):
    """The ``i``-th source of the program's group; one without bytes after the last."""
    column = tl.load(sources.p_columns + tl.program_id(0) * (BYTES.PARTS + 1) + 1 + i)
    source = described(sources, tl.maximum(column, 0))
    return Source(
        column=source.column, salt=source.salt, address=source.address, page_stride=source.page_stride,
        slot_stride=source.slot_stride, chunk_stride=source.chunk_stride,
        present=tl.where(column < 0, 0, source.present), words=source.words,
    )  # fmt: skip


@triton.jit
def has_bytes(source, slot, BYTES: tl.constexpr, S: tl.constexpr):
    """Whether the source's pages have bytes of each slot."""
    return slot.to(tl.int32) % BYTES.STRIPS[S].page_size < source.present


@triton.jit
def tile_of(i, BYTES: tl.constexpr):
    """Numbers of the slots, or of what else has one, in the ``i``-th tile."""
    SLOTS: tl.constexpr = BYTES.SLOTS
    o_slot = i * SLOTS + tl.arange(0, SLOTS)
    if BYTES.ABREAST > 0:
        o_slot = spread(i, BYTES)
    return o_slot


@triton.jit
def keep(sources, p_kept, slot, m, BYTES: tl.constexpr):
    """Writes the fingerprints of slots, of all sources that this program takes together, to ``p_kept``: int64 ``[slots,
    count]``."""
    if BYTES.PARTS > 0:
        p_first = p_kept + slot * sources.count + group(sources, BYTES) * 2
        first, second, parts, _odd = fold_sums(sources, slot, m, BYTES, False)
        tl.store(p_first, first, mask=parts > 0)
        tl.store(p_first + 1, second, mask=parts > 0)
    else:
        for s in tl.static_range(len(BYTES.STRIPS)):
            source = describe(sources, s, BYTES)
            there = m & has_bytes(source, slot, BYTES, s)
            value, _odd = fold(sources, source, slot, there, BYTES, s, False, False)
            tl.store(p_kept + slot * sources.count + source.column, value, mask=there)


@triton.jit
def fold_sums(sources, slot, m, BYTES: tl.constexpr, FLOATS: tl.constexpr):
    """Both numbers of each slot for the program's group, int64, see `sums.Sums`; the number of sources with bytes of
    it, int32, 0 where ``m`` is false; and, with `FLOATS`, a number that isn't 0 where a float has all its exponent bits
    set."""
    BLOCK_WORDS: tl.constexpr = BYTES.STRIPS[0].load_words
    SUM_WORDS: tl.constexpr = BYTES.STRIPS[0].sum_words
    ROWS: tl.constexpr = slot.shape[0]
    first = tl.zeros((ROWS, BLOCK_WORDS // SUM_WORDS), tl.uint64)
    second = tl.zeros((ROWS, BLOCK_WORDS // SUM_WORDS), tl.uint64)
    odd = tl.zeros((ROWS, BLOCK_WORDS), tl.uint32)
    parts = tl.zeros((ROWS,), tl.int32)
    for i in range(BYTES.PARTS):
        source = part(sources, i, BYTES)
        there = m & has_bytes(source, slot, BYTES, 0)
        total, bits = fold_lanes(sources, source, slot, there, BYTES, 0, False, FLOATS)
        weight = tl.load(sources.p_weights + source.column).to(tl.uint64, bitcast=True)
        first += total
        second += total * weight
        odd = odd | bits
        parts += there.to(tl.int32)
    found = tl.zeros_like(slot).to(tl.uint32)
    if FLOATS:
        found = tl.max(odd, 1)
    p_salt = sources.p_salts + sources.named + group(sources, BYTES) * 2
    one = tl.load(p_salt) + tl.sum(first, 1).to(tl.int64, bitcast=True)
    other = tl.load(p_salt + 1) + tl.sum(second, 1).to(tl.int64, bitcast=True)
    return one, other, parts, found


@triton.jit
def fold(sources, source, slot, m, BYTES: tl.constexpr, S: tl.constexpr, ROLLED: tl.constexpr, FLOATS: tl.constexpr):
    """Fingerprint of each slot in the ``source`` of strip `S`, int64, and, with `FLOATS`, a number that isn't 0 where a
    float has all its exponent bits set. `ROLLED` keeps the compiler from unrolling the loop over a slot."""
    if BYTES.ABREAST > 0:
        value, odd = fold_abreast(sources, source, slot, m, BYTES, S, FLOATS)
    else:
        value, odd = fold_rows(sources, source, slot, m, BYTES, S, ROLLED, FLOATS)
    return value, odd


@triton.jit
def fold_rows(
    sources, source, slot, m, BYTES: tl.constexpr, S: tl.constexpr, ROLLED: tl.constexpr, FLOATS: tl.constexpr
):
    """As `fold` for slots of one source."""
    total, odd = fold_lanes(sources, source, slot, m, BYTES, S, ROLLED, FLOATS)
    found = tl.zeros_like(slot).to(tl.uint32)
    if FLOATS:
        found = tl.max(odd, 1)
    return source.salt + tl.sum(total, 1).to(tl.int64, bitcast=True), found


@triton.jit
def fold_lanes(
    sources, source, slot, m, BYTES: tl.constexpr, S: tl.constexpr, ROLLED: tl.constexpr, FLOATS: tl.constexpr
):
    """The sums of `fold_rows` before the lanes of a slot are added up: uint64 ``[slots, lanes]``, and its odd bits."""
    BLOCK_WORDS: tl.constexpr = BYTES.STRIPS[S].load_words
    UNROLL: tl.constexpr = BYTES.STRIPS[S].unrolled
    SUM_WORDS: tl.constexpr = BYTES.STRIPS[S].sum_words
    STAGES: tl.constexpr = BYTES.STRIPS[S].stages if BYTES.STRIPS[S].stages > 0 else None
    ROWS: tl.constexpr = slot.shape[0]
    first = first_byte(source, slot, BYTES, S)
    # Sums stay in their column until the end: a few lanes share a slot, so one short reduction ends each tile.
    total = tl.zeros((ROWS, BLOCK_WORDS // SUM_WORDS), tl.uint64)
    odd = tl.zeros((ROWS, BLOCK_WORDS), tl.uint32)
    if FLOATS:
        p_source = sources.p_descriptors + source.column * SOURCE_FIELDS
        exponent = tl.load(p_source + SOURCE_EXPONENT).to(tl.uint32)
        increment = tl.load(p_source + SOURCE_INCREMENT).to(tl.uint32)
        carry = tl.load(p_source + SOURCE_CARRY).to(tl.uint32)
    # A few blocks at a time: their loads are in flight together. More of them would only crowd each other out of the
    # first cache, so where that matters the compiler is not told the number of rounds: it can't unroll them then.
    words = BYTES.STRIPS[S].slot_words
    if ROLLED:
        words = source.words
    for w in tl.range(0, words, BLOCK_WORDS * UNROLL, num_stages=STAGES):
        # All loads first: the compiler keeps that order, and waits at the first use.
        loaded = ()
        for u in tl.static_range(UNROLL):
            block = load_block(sources, source, first, m, w + u * BLOCK_WORDS, BYTES, S)
            loaded += (block,)  # type: ignore[assignment]
        for u in tl.static_range(UNROLL):
            word, key = loaded[u]  # type: ignore[var-annotated]
            terms = word.to(tl.uint64) * key[None, :]  # type: ignore[var-annotated]
            if SUM_WORDS > 1:
                terms = tl.sum(tl.reshape(terms, (ROWS, BLOCK_WORDS // SUM_WORDS, SUM_WORDS)), 2)
            total += terms
            if FLOATS:
                odd = odd | (((word & exponent) + increment) & carry)
    return total, odd


@triton.jit
def load_block(sources, source, first, m, w, BYTES: tl.constexpr, S: tl.constexpr):
    """One load of `fold`: the words from ``w`` on of each slot, and their keys."""
    WORDS: tl.constexpr = BYTES.STRIPS[S].slot_words
    BLOCK_WORDS: tl.constexpr = BYTES.STRIPS[S].load_words
    UNROLL: tl.constexpr = BYTES.STRIPS[S].unrolled
    o_word = w + tl.arange(0, BLOCK_WORDS)
    word = load_words(source, first, m, o_word, BYTES, S, BLOCK_WORDS, UNROLL)
    # Kernels whose threads add up words of their own were measured without a mask here, the others with one.
    if BYTES.STRIPS[S].sum_words > 1 and WORDS % (BLOCK_WORDS * UNROLL) == 0:
        key = tl.load(sources.p_keys + o_word)
    else:
        key = tl.load(sources.p_keys + o_word, mask=o_word < WORDS, other=0)
    return word, key.to(tl.uint64, bitcast=True)


@triton.jit
def fold_abreast(sources, source, slot, m, BYTES: tl.constexpr, S: tl.constexpr, FLOATS: tl.constexpr):
    """As `fold` for sources abreast; takes no time where ``m`` is false for all of them."""
    WORDS: tl.constexpr = BYTES.STRIPS[S].slot_words
    COLUMNS: tl.constexpr = BYTES.STRIPS[S].load_words
    UNROLL: tl.constexpr = BYTES.STRIPS[S].unrolled
    ROUND: tl.constexpr = COLUMNS * UNROLL
    QUAD: tl.constexpr = COLUMNS if COLUMNS < 4 else 4
    ROWS: tl.constexpr = slot.shape[0]
    first = first_byte(source, slot, BYTES, S)
    total = tl.zeros((ROWS, COLUMNS // QUAD), tl.uint64)
    odd = tl.zeros((ROWS, COLUMNS // QUAD), tl.uint32)
    if FLOATS:
        p_source = sources.p_descriptors + source.column * SOURCE_FIELDS
        exponent = tl.load(p_source + SOURCE_EXPONENT).to(tl.uint32)[:, None]
        increment = tl.load(p_source + SOURCE_INCREMENT).to(tl.uint32)[:, None]
        carry = tl.load(p_source + SOURCE_CARRY).to(tl.uint32)[:, None]
    for w in range(0, tl.where(tl.max(m.to(tl.int32), 0) > 0, WORDS, 0), ROUND):
        # One load, not one a column: the compiler would wait for the first before it asks for the last.
        o_word = w + tl.arange(0, ROUND)
        word = load_words(source, first, m, o_word, BYTES, S, ROUND, 1)
        # In the shape of the words, so that each thread loads the keys of its own and none waits for another's.
        p_key = sources.p_keys + tl.zeros((ROWS, ROUND), tl.int32) + o_word[None, :]
        if WORDS % ROUND == 0:
            key = tl.load(p_key)
        else:
            key = tl.load(p_key, mask=(o_word < WORDS)[None, :] & tl.full((ROWS, ROUND), True, tl.int1), other=0)
        terms = word.to(tl.uint64) * key.to(tl.uint64, bitcast=True)
        total += tl.sum(tl.sum(tl.reshape(terms, (ROWS, UNROLL, COLUMNS // QUAD, QUAD)), 3), 1)
        if FLOATS:
            bits = ((word & exponent) + increment) & carry
            odd = odd | tl.max(tl.max(tl.reshape(bits, (ROWS, UNROLL, COLUMNS // QUAD, QUAD)), 3), 1)
    found = tl.zeros_like(slot).to(tl.uint32)
    if FLOATS:
        found = tl.max(odd, 1)
    return source.salt + tl.sum(total, 1).to(tl.int64, bitcast=True), found


@triton.jit
def load_strip(sources, source, slot, m, BYTES: tl.constexpr, S: tl.constexpr):
    """All words of each slot in a narrow source, and their keys: uint64 ``[slots, words]``."""
    BLOCK_WORDS: tl.constexpr = BYTES.STRIPS[S].load_words
    o_word = tl.arange(0, BLOCK_WORDS)
    word = load_words(source, first_byte(source, slot, BYTES, S), m, o_word, BYTES, S, BLOCK_WORDS, 1)
    key = tl.load(sources.p_keys + o_word, mask=o_word < BYTES.STRIPS[S].slot_words, other=0)
    return word.to(tl.uint64), key.to(tl.uint64, bitcast=True)[None, :]


@triton.jit
def first_byte(source, slot, BYTES: tl.constexpr, S: tl.constexpr):
    """Where each slot begins, in bytes from the source's address."""
    first = (slot.to(tl.int32) // BYTES.STRIPS[S].page_size).to(tl.int64) * source.page_stride
    if BYTES.STRIPS[S].page_size > 1:
        first += (slot.to(tl.int32) % BYTES.STRIPS[S].page_size).to(tl.int64) * source.slot_stride
    return first


@triton.jit
def load_words(
    source, first, m, o_word,
    BYTES: tl.constexpr, S: tl.constexpr, BLOCK_WORDS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Words ``o_word`` of each slot, which begins ``first`` bytes after the source's address; 0 beyond the slot's end
    and where ``m`` is false."""  # [slots, BLOCK_WORDS]
    ABREAST: tl.constexpr = len(source.address.shape) > 0
    WORDS: tl.constexpr = BYTES.STRIPS[S].slot_words
    CHUNK_WORDS: tl.constexpr = BYTES.STRIPS[S].chunk_words
    ALIGNMENT: tl.constexpr = BYTES.STRIPS[S].alignment
    address, chunk_stride = source.address, source.chunk_stride
    m_word = m[:, None] & tl.full((1, BLOCK_WORDS), True, tl.int1)
    if WORDS % (BLOCK_WORDS * UNROLL) != 0:
        m_word = m_word & (o_word < WORDS)[None, :]
    if ALIGNMENT >= 4:
        p_words = tl.multiple_of(tl.multiple_of(address, ALIGNMENT).to(tl.pointer_type(tl.uint32)), ALIGNMENT)
        if ABREAST:
            p_words = p_words[:, None]
        offset = o_word
        if WORDS > CHUNK_WORDS:
            chunk_words = tl.multiple_of(chunk_stride // 4, ALIGNMENT // 4)
            if ABREAST:
                chunk_words = chunk_words[:, None]
            offset = o_word // CHUNK_WORDS * chunk_words + o_word % CHUNK_WORDS
        if len(offset.shape) == 1:
            offset = offset[None, :]
        p_word = p_words + tl.multiple_of(first // 4, ALIGNMENT // 4)[:, None] + offset
        word = tl.load(p_word, mask=m_word, other=0, eviction_policy="evict_first")
    else:
        inside = o_word % CHUNK_WORDS * 4
        if ABREAST:
            address, chunk_stride = address[:, None], chunk_stride[:, None]
        offset = o_word // CHUNK_WORDS * chunk_stride + inside
        if len(offset.shape) == 1:
            offset = offset[None, :]
        p_byte = address.to(tl.pointer_type(tl.uint8)) + first[:, None] + offset
        word = tl.zeros((m.shape[0], BLOCK_WORDS), tl.uint32)
        for b in tl.static_range(4):
            m_byte = m_word & (inside + b < BYTES.STRIPS[S].chunk_bytes)[None, :]
            word = word | (tl.load(p_byte + b, mask=m_byte, other=0).to(tl.uint32) << (8 * b))
    return word


@triton.jit
def spread(number, BYTES: tl.constexpr):
    """The same number in each row of a tile of sources abreast; int64."""
    ROWS: tl.constexpr = BYTES.ABREAST
    return number + tl.zeros((ROWS,), tl.int64)
