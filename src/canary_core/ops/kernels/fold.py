"""The fingerprint of a tile: places of a slot's bytes in a source, their loads, and their sum.

The rows of a tile are slots of one source, or sources abreast of one long slot; in the latter case a source's
description is a block (see `tiles.Tile`).

The inner loop is a masked 16-byte load, a widening multiply and an add per 4 bytes: memory is the limit, not
arithmetic.
"""

import triton
import triton.language as tl

from canary_core.records import DESCRIPTOR_WORDS, Descriptor

STRIP = tl.constexpr(8)
"""Number of constants for each source of a group in ``STRIPS``, one flat tuple, first the wide source's and then the
narrow one's, if there is one. Kernels know the constants by number:

| number            | constant              |
|-------------------|-----------------------|
| ``S * STRIP``     | slots of a page       |
| ``S * STRIP + 1`` | chunks of a slot      |
| ``S * STRIP + 2`` | bytes of a chunk      |
| ``S * STRIP + 3`` | alignment             |
| ``S * STRIP + 4`` | words of a load       |
| ``S * STRIP + 5`` | loads in flight       |
| ``S * STRIP + 6`` | words of a sum        |
| ``S * STRIP + 7`` | stages                |
"""
FIELDS = tl.constexpr(DESCRIPTOR_WORDS)
ADDRESS = tl.constexpr(int(Descriptor.ADDRESS))
PAGE_STRIDE = tl.constexpr(int(Descriptor.PAGE_STRIDE))
SLOT_STRIDE = tl.constexpr(int(Descriptor.SLOT_STRIDE))
CHUNK_COUNT = tl.constexpr(int(Descriptor.CHUNKS))
CHUNK_STRIDE = tl.constexpr(int(Descriptor.CHUNK_STRIDE))
CHUNK_LENGTH = tl.constexpr(int(Descriptor.CHUNK_BYTES))
PRESENT = tl.constexpr(int(Descriptor.PRESENT))
EXPONENT = tl.constexpr(int(Descriptor.EXPONENT))
INCREMENT = tl.constexpr(int(Descriptor.INCREMENT))
CARRY = tl.constexpr(int(Descriptor.CARRY))


@triton.jit
def describe(p_descriptors, p_columns, p_salts, N: tl.constexpr, S: tl.constexpr, ABREAST: tl.constexpr):
    """The `S`-th of the `N` sources of this program. `ABREAST`: how many sources a program takes together, of how many;
    each field is a block of theirs then, and beyond the last one no slot has bytes. Kernels know the fields by number:

    | field | content                                             |
    |-------|-----------------------------------------------------|
    | 0     | column: its index among the region's sources        |
    | 1     | salt of its fingerprints                            |
    | 2     | address of slot 0                                   |
    | 3     | stride of pages, in bytes                           |
    | 4     | stride of slots, in bytes                           |
    | 5     | stride of chunks, in bytes                          |
    | 6     | slots of a page that have bytes                     |
    | 7     | words of a slot                                     |
    """
    ROWS: tl.constexpr = ABREAST[0]
    if ROWS > 0:
        o_source = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.load(p_columns + tl.minimum(o_source, ABREAST[1] - 1) * N + S)
    else:
        column = tl.load(p_columns + tl.program_id(0) * N + S)
    p_source = p_descriptors + column * FIELDS
    chunk_words = (tl.load(p_source + CHUNK_LENGTH) + 3) // 4
    words = (tl.load(p_source + CHUNK_COUNT) * chunk_words).to(tl.int32)
    salt, address = tl.load(p_salts + column), tl.load(p_source + ADDRESS)
    page, slot, chunk = (
        tl.load(p_source + PAGE_STRIDE), tl.load(p_source + SLOT_STRIDE), tl.load(p_source + CHUNK_STRIDE)
    )  # fmt: skip
    present = tl.load(p_source + PRESENT)
    if ROWS > 0:
        present = tl.where(o_source < ABREAST[1], present, 0)
    return column, salt, address, page, slot, chunk, present, words


@triton.jit
def fold(
    p_descriptors, source, p_keys, slot, m,
    STRIPS: tl.constexpr, S: tl.constexpr, ROLLED: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """Fingerprint of each slot in the ``source`` of strip `S`, int64, and, with `FLOATS`, a number that isn't 0 where a
    float has all its exponent bits set. `ROLLED` keeps the compiler from unrolling the loop over a slot."""
    CHUNK_WORDS: tl.constexpr = (STRIPS[S * STRIP + 2] + 3) // 4
    WORDS: tl.constexpr = STRIPS[S * STRIP + 1] * CHUNK_WORDS
    BLOCK_WORDS: tl.constexpr = STRIPS[S * STRIP + 4]
    UNROLL: tl.constexpr = STRIPS[S * STRIP + 5]
    SUM_WORDS: tl.constexpr = STRIPS[S * STRIP + 6]
    ROWS: tl.constexpr = slot.shape[0]
    first = first_byte(source, slot, STRIPS[S * STRIP])
    # Sums stay in their column until the end: a few lanes share a slot, so one short reduction ends each tile.
    total = tl.zeros((ROWS, BLOCK_WORDS // SUM_WORDS), tl.uint64)
    odd = tl.zeros((ROWS, BLOCK_WORDS), tl.uint32)
    if FLOATS:
        p_source = p_descriptors + source[0] * FIELDS
        exponent = tl.load(p_source + EXPONENT).to(tl.uint32)
        increment = tl.load(p_source + INCREMENT).to(tl.uint32)
        carry = tl.load(p_source + CARRY).to(tl.uint32)
    # A few blocks at a time: their loads are in flight together. More of them would only crowd each other out of the
    # first cache, so where that matters the compiler is not told the number of rounds: it can't unroll them then.
    words = WORDS
    if ROLLED:
        words = source[7]
    for w in tl.range(0, words, BLOCK_WORDS * UNROLL, num_stages=STRIPS[S * STRIP + 7]):
        # All loads first: the compiler keeps that order, and waits at the first use.
        loaded = ()
        for u in tl.static_range(UNROLL):
            block = load_block(source, p_keys, first, m, w + u * BLOCK_WORDS, STRIPS, S)
            loaded += (block,)  # type: ignore[assignment]
        for u in tl.static_range(UNROLL):
            word, key = loaded[u]  # type: ignore[var-annotated]
            terms = word.to(tl.uint64) * key[None, :]  # type: ignore[var-annotated]
            if SUM_WORDS > 1:
                terms = tl.sum(tl.reshape(terms, (ROWS, BLOCK_WORDS // SUM_WORDS, SUM_WORDS)), 2)
            total += terms
            if FLOATS:
                odd = odd | (((word & exponent) + increment) & carry)
    found = tl.zeros_like(slot).to(tl.uint32)
    if FLOATS:
        found = tl.max(odd, 1)
    return source[1] + tl.sum(total, 1).to(tl.int64, bitcast=True), found


@triton.jit
def load_block(source, p_keys, first, m, w, STRIPS: tl.constexpr, S: tl.constexpr):
    """One load of `fold`: the words from ``w`` on of each slot, and their keys."""
    WORDS: tl.constexpr = STRIPS[S * STRIP + 1] * ((STRIPS[S * STRIP + 2] + 3) // 4)
    BLOCK_WORDS: tl.constexpr = STRIPS[S * STRIP + 4]
    UNROLL: tl.constexpr = STRIPS[S * STRIP + 5]
    o_word = w + tl.arange(0, BLOCK_WORDS)
    word = load_words(
        source[2], first, source[5], m, o_word, STRIPS[S * STRIP + 2], WORDS, STRIPS[S * STRIP + 3], BLOCK_WORDS,
        UNROLL,
    )  # fmt: skip
    # Kernels whose threads add up words of their own were measured without a mask here, the others with one.
    if STRIPS[S * STRIP + 6] > 1 and WORDS % (BLOCK_WORDS * UNROLL) == 0:
        key = tl.load(p_keys + o_word)
    else:
        key = tl.load(p_keys + o_word, mask=o_word < WORDS, other=0)
    return word, key.to(tl.uint64, bitcast=True)


@triton.jit
def fold_abreast(
    p_descriptors, source, p_keys, slot, m,
    STRIPS: tl.constexpr, S: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """As `fold` for sources abreast; takes no time where ``m`` is false for all of them."""
    CHUNK_WORDS: tl.constexpr = (STRIPS[S * STRIP + 2] + 3) // 4
    WORDS: tl.constexpr = STRIPS[S * STRIP + 1] * CHUNK_WORDS
    COLUMNS: tl.constexpr = STRIPS[S * STRIP + 4]
    UNROLL: tl.constexpr = STRIPS[S * STRIP + 5]
    ROUND: tl.constexpr = COLUMNS * UNROLL
    QUAD: tl.constexpr = COLUMNS if COLUMNS < 4 else 4
    ROWS: tl.constexpr = slot.shape[0]
    first = first_byte(source, slot, STRIPS[S * STRIP])
    total = tl.zeros((ROWS, COLUMNS // QUAD), tl.uint64)
    odd = tl.zeros((ROWS, COLUMNS // QUAD), tl.uint32)
    if FLOATS:
        p_source = p_descriptors + source[0] * FIELDS
        exponent = tl.load(p_source + EXPONENT).to(tl.uint32)[:, None]
        increment = tl.load(p_source + INCREMENT).to(tl.uint32)[:, None]
        carry = tl.load(p_source + CARRY).to(tl.uint32)[:, None]
    for w in range(0, tl.where(tl.max(m.to(tl.int32), 0) > 0, WORDS, 0), ROUND):
        # One load, not one a column: the compiler would wait for the first before it asks for the last.
        o_word = w + tl.arange(0, ROUND)
        word = load_words(
            source[2], first, source[5], m, o_word, STRIPS[S * STRIP + 2], WORDS, STRIPS[S * STRIP + 3], ROUND, 1
        )  # fmt: skip
        # In the shape of the words, so that each thread loads the keys of its own and none waits for another's.
        p_key = p_keys + tl.zeros((ROWS, ROUND), tl.int32) + o_word[None, :]
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
    return source[1] + tl.sum(total, 1).to(tl.int64, bitcast=True), found


@triton.jit
def load_strip(source, p_keys, slot, m, STRIPS: tl.constexpr):
    """All words of each slot in the second source of a group, and their keys: uint64 ``[slots, words]``."""
    CHUNK_BYTES: tl.constexpr = STRIPS[STRIP + 2]
    BLOCK_WORDS: tl.constexpr = STRIPS[STRIP + 4]
    WORDS: tl.constexpr = STRIPS[STRIP + 1] * ((CHUNK_BYTES + 3) // 4)
    o_word = tl.arange(0, BLOCK_WORDS)
    word = load_words(
        source[2], first_byte(source, slot, STRIPS[STRIP]), source[5], m, o_word, CHUNK_BYTES, WORDS, STRIPS[STRIP + 3],
        BLOCK_WORDS, 1,
    )  # fmt: skip
    key = tl.load(p_keys + o_word, mask=o_word < WORDS, other=0).to(tl.uint64, bitcast=True)
    return word.to(tl.uint64), key[None, :]


@triton.jit
def first_byte(source, slot, SOURCE_PAGE: tl.constexpr):
    """Where each slot begins, in bytes from the source's address."""
    first = (slot.to(tl.int32) // SOURCE_PAGE).to(tl.int64) * source[3]
    if SOURCE_PAGE > 1:
        first += (slot.to(tl.int32) % SOURCE_PAGE).to(tl.int64) * source[4]
    return first


@triton.jit
def load_words(
    address, first, chunk_stride, m, o_word,
    CHUNK_BYTES: tl.constexpr, WORDS: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK_WORDS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Words ``o_word`` of each slot, which begins ``first`` bytes after ``address``; 0 beyond the slot's end and where
    ``m`` is false."""  # [slots, BLOCK_WORDS]
    ABREAST: tl.constexpr = len(address.shape) > 0
    CHUNK_WORDS: tl.constexpr = (CHUNK_BYTES + 3) // 4
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
            m_byte = m_word & (inside + b < CHUNK_BYTES)[None, :]
            word = word | (tl.load(p_byte + b, mask=m_byte, other=0).to(tl.uint32) << (8 * b))
    return word


@triton.jit
def spread(number, ABREAST: tl.constexpr):
    """The same number in each row of a tile of sources abreast; int64."""
    ROWS: tl.constexpr = ABREAST[0]
    return number + tl.zeros((ROWS,), tl.int64)
