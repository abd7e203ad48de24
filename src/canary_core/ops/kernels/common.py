"""Device functions common to several kernels: the mix of the prefix hash, slot look-up, and reporting."""

import triton
import triton.language as tl

from canary_core.ops import hashing
from canary_core.ops.kernels.words import (
    CLAIM_BITS,
    COUNT_DRAINED,
    COUNT_KINDS_DRAINED,
    COUNT_ROWS,
    RING_KIND_ROWS,
    RING_WORDS,
    ROW_FOUND_VALUE,
    ROW_FREED,
    ROW_KIND,
    ROW_POSITION,
    ROW_REGION,
    ROW_SLOT,
    ROW_SOURCE,
    ROW_STEP,
    ROW_STEP_WRITTEN,
    ROW_STORED_POSITION,
    ROW_STORED_TOKEN,
    ROW_STORED_VALUE,
    ROW_STORED_WRITER,
    ROW_TOKEN,
    ROW_WRITER,
    STATUS_NULL,
    STATUS_OK,
    STATUS_RANGE,
)

GOLDEN = tl.constexpr(hashing.GOLDEN)
MULTIPLY_1 = tl.constexpr(hashing.MULTIPLY_1)
MULTIPLY_2 = tl.constexpr(hashing.MULTIPLY_2)


@triton.jit
def claim_of(step, o_token):
    """`Scratch.claim`: int64 ``step`` and token numbers, gives int64."""
    return (step << CLAIM_BITS) + o_token + 1


@triton.jit
def mix(token, position):
    """`hashing.mix`: int64 ``position`` and the low 32 bits of ``token``, gives int64."""
    x = (position << 32) | (token & 0xFFFFFFFF)
    x = x.to(tl.uint64, bitcast=True) + GOLDEN
    x = (x ^ (x >> 30)) * MULTIPLY_1
    x = (x ^ (x >> 27)) * MULTIPLY_2
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def resolve(number, space, m, NUMBERS: tl.constexpr):
    """`Region.resolve`: slot and status of int64 slot numbers, by `fields.Space` or `fields.TablePlaces`. `NUMBERS`:
    `launches.Numbers`, or `launches.TableConstants`."""
    negative = number < 0
    if NUMBERS.GROUP > 1:
        number = tl.where(negative, number, number // NUMBERS.GROUP)
    slot = number
    bad = negative & False
    if NUMBERS.POOL_ROWS > 0:
        inside = number % NUMBERS.POOL_ROWS
        bad = (number >= 0) & (inside >= NUMBERS.POOL_SLOTS)
        slot = tl.where(negative | bad, number, number // NUMBERS.POOL_ROWS * NUMBERS.POOL_SLOTS + inside)
    if space.p_map is not None:
        unmapped = (number >= 0) & (bad == 0) & (slot >= space.map_length)
        usable = (negative | bad | unmapped) == 0
        slot = tl.where(usable, tl.load(space.p_map + slot, mask=m & usable, other=0).to(tl.int64), slot)
        bad = bad | unmapped
    if NUMBERS.RING_PAGE > 0:
        slot = tl.where(
            bad | (slot < 0), slot, slot // NUMBERS.RING_PAGE * NUMBERS.RING_ROWS + slot % NUMBERS.RING_ROWS
        )
    null = (bad == 0) & ((slot < 0) | ((slot >= space.null_first) & (slot < space.null_end)))
    bad = bad | (slot >= space.slots)
    status = tl.where(bad, STATUS_RANGE, tl.where(null, STATUS_NULL, STATUS_OK))
    return slot, status


@triton.jit
def lookup(places, row_first, position, m, TABLE: tl.constexpr):
    """`ops.torch.plan.lookup`: slot and status of int64 positions, of the table row from element ``row_first`` on."""
    element, column, present = find_entry(places, row_first, position, TABLE)
    entry = tl.load(places.p_entries + element, mask=m & present, other=-1)
    slot, status = resolve_entry(places, entry, column, m & present, TABLE)
    slot = tl.where(present, slot, -1)
    status = tl.where(present, status, STATUS_RANGE)
    return slot, status


@triton.jit
def find_entry(places, row_first, position, TABLE: tl.constexpr):
    """The element of a table with the entry of each position, the position's column, and whether the element exists."""
    column = position.to(tl.int64)
    if TABLE.GROUP > 1:
        column = (column + 1) * TABLE.GROUP - 1
    if TABLE.RING > 0:
        column = column % TABLE.RING
    page = column // TABLE.PAGE_SIZE
    element = row_first + page
    return element, column, (page < places.width) & (element >= 0) & (element < places.extent)


@triton.jit
def resolve_entry(places, entry, column, m, TABLE: tl.constexpr):
    """Slot and status of the entries of a table."""
    entry = entry.to(tl.int64)
    number = tl.where(entry >= 0, entry * TABLE.PAGE_SIZE + column % TABLE.PAGE_SIZE, entry)
    return resolve(number, places, m, TABLE)


@triton.jit
def readable(prefix, new, TABLE: tl.constexpr):
    """Number of positions before ``prefix`` read by a forward of ``new`` tokens, in a region with a window, in one of
    chunks, or in a ring, where only a forward that completes a group reads. In the type of ``prefix``."""
    count = tl.minimum(prefix, TABLE.WINDOW - 1)
    if TABLE.ALIGN < 0:
        count = prefix % TABLE.WINDOW
    if TABLE.ALIGN > 0:
        end = prefix + tl.maximum(new, 0).to(prefix.dtype)
        begun = tl.minimum(prefix, prefix % TABLE.ALIGN + (TABLE.WINDOW - 1))
        count = tl.where(end // TABLE.ALIGN > prefix // TABLE.ALIGN, begun, 0)
    return count


@triton.jit
def load_head(p_records, slot, m):
    """The first 16 bytes of each slot's record, as int64: token and position word, and prefix hash."""
    return tl.load(p_records + slot * 4, mask=m, other=0), tl.load(p_records + slot * 4 + 1, mask=m, other=0)


@triton.jit
def split_head(first):
    """Token and position word (``position * 32 + state``) of a record's first 8 bytes, as int64."""
    return first.to(tl.int32).to(tl.int64), first >> 32


@triton.jit
def report(
    region, kind, m, source, slot, position, token, stored_token, stored_position, stored_value, found_value, writer,
    stored_writer, step_written, freed, step,
):  # fmt: skip
    """Counts the findings where ``m`` and keeps rows of as many as the ring has room for, and of the first of each
    kind. Blocks of one shape."""
    of_kind = tl.atomic_add(region.p_counters + kind, 1, mask=m)
    number = tl.atomic_add(region.p_counters + COUNT_ROWS + tl.zeros_like(kind), 1, mask=m)
    in_ring = number - tl.load(region.p_counters + COUNT_DRAINED) < region.ring_rows
    first = of_kind - tl.load(region.p_counters + COUNT_KINDS_DRAINED + kind, mask=m, other=0) < RING_KIND_ROWS
    keep = m & (in_ring | first)
    behind = region.ring_rows + kind * RING_KIND_ROWS + of_kind % RING_KIND_ROWS
    p_row = region.p_ring + tl.where(in_ring, number % region.ring_rows, behind) * RING_WORDS
    # A loop with one store, not a store for each word: Triton takes as long for sixteen as for the rest of a kernel.
    for word in range(RING_WORDS):
        value = number + 1
        value = tl.where(word == ROW_KIND, kind, value)
        value = tl.where(word == ROW_REGION, region.index, value)
        value = tl.where(word == ROW_SOURCE, source, value)
        value = tl.where(word == ROW_SLOT, slot, value)
        value = tl.where(word == ROW_POSITION, position, value)
        value = tl.where(word == ROW_TOKEN, token, value)
        value = tl.where(word == ROW_STORED_TOKEN, stored_token, value)
        value = tl.where(word == ROW_STORED_POSITION, stored_position, value)
        value = tl.where(word == ROW_STORED_VALUE, stored_value, value)
        value = tl.where(word == ROW_FOUND_VALUE, found_value, value)
        value = tl.where(word == ROW_WRITER, writer, value)
        value = tl.where(word == ROW_STORED_WRITER, stored_writer, value)
        value = tl.where(word == ROW_STEP_WRITTEN, step_written, value)
        value = tl.where(word == ROW_FREED, freed, value)
        value = tl.where(word == ROW_STEP, step, value)
        tl.store(p_row + word, value, mask=keep)


@triton.jit
def report_record(
    region, kind, m, source, slot, position, token, p_record, usable, stored_value, found_value, writer, step,
):  # fmt: skip
    """`report` with the fields of each slot's record at ``p_record``; -1 where there is none (``usable`` false)."""
    m_record = m & usable
    first = tl.load(p_record, mask=m_record, other=-1)
    written = tl.load(p_record + 2, mask=m_record, other=-1)
    freed = tl.load(p_record + 3, mask=m_record, other=-1)
    stored_token, stored_position = split_head(first)
    step_written, stored_writer = split_head(written)
    report(
        region, kind, m, source, slot, position, token, stored_token, stored_position, stored_value, found_value,
        writer, stored_writer, step_written, freed, step,
    )  # fmt: skip
