"""Device functions common to several kernels: the mix of the prefix hash, slot look-up, and reporting."""

import triton
import triton.language as tl

from canary_core.ops import hashing
from canary_core.records import CLAIM_TOKEN_BITS, CONTENT, ROW_WORDS, STATES, UNPARKED, Counter, Row, State, Status

# Kernels see globals only as constexpr.
GOLDEN = tl.constexpr(hashing.GOLDEN)
MULTIPLY_1 = tl.constexpr(hashing.MULTIPLY_1)
MULTIPLY_2 = tl.constexpr(hashing.MULTIPLY_2)
CLAIM_BITS = tl.constexpr(CLAIM_TOKEN_BITS)
CLAIM_TOKENS = tl.constexpr((1 << CLAIM_TOKEN_BITS) - 1)
STATUS_OK = tl.constexpr(int(Status.OK))
STATUS_RANGE = tl.constexpr(int(Status.RANGE))
STATUS_NULL = tl.constexpr(int(Status.NULL))
UNWRITTEN = tl.constexpr(int(State.UNWRITTEN))
WRITTEN = tl.constexpr(int(State.WRITTEN))
ALLOCATED = tl.constexpr(int(State.ALLOCATED))
STATE_VALUES = tl.constexpr(STATES)
CONTENT_BITS = tl.constexpr(CONTENT)
FREED = tl.constexpr(int(State.FREED))
PARKED = tl.constexpr(int(State.PARKED))
NOT_PARKED = tl.constexpr(~int(State.PARKED))
READ_STATE = tl.constexpr(UNPARKED)
READ_WORD = tl.constexpr(UNPARKED - STATES)
ARRIVED = tl.constexpr(int(State.ARRIVED))
UNKNOWN = tl.constexpr(int(State.UNKNOWN))
COUNT_ROWS = tl.constexpr(int(Counter.ROWS))
COUNT_DRAINED = tl.constexpr(int(Counter.DRAINED))
RING_WORDS = tl.constexpr(ROW_WORDS)
ROW_SEQUENCE = tl.constexpr(int(Row.SEQUENCE))
ROW_KIND = tl.constexpr(int(Row.KIND))
ROW_REGION = tl.constexpr(int(Row.REGION))
ROW_SOURCE = tl.constexpr(int(Row.SOURCE))
ROW_SLOT = tl.constexpr(int(Row.SLOT))
ROW_POSITION = tl.constexpr(int(Row.POSITION))
ROW_TOKEN = tl.constexpr(int(Row.TOKEN))
ROW_STORED_TOKEN = tl.constexpr(int(Row.STORED_TOKEN))
ROW_STORED_POSITION = tl.constexpr(int(Row.STORED_POSITION))
ROW_STORED_VALUE = tl.constexpr(int(Row.STORED_VALUE))
ROW_FOUND_VALUE = tl.constexpr(int(Row.FOUND_VALUE))
ROW_WRITER = tl.constexpr(int(Row.WRITER))
ROW_STORED_WRITER = tl.constexpr(int(Row.STORED_WRITER))
ROW_STEP_WRITTEN = tl.constexpr(int(Row.STEP_WRITTEN))
ROW_FREED = tl.constexpr(int(Row.FREED))
ROW_STEP = tl.constexpr(int(Row.STEP))


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
def resolve(
    number, p_map, map_length, slots, null_first, null_end, m,
    POOL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`Region.resolve`: slot and status of int64 slot numbers. Null slots are those from ``null_first`` to before
    ``null_end``. `POOL`: see `launches.TableConstants`."""
    POOL_ROWS: tl.constexpr = POOL[0]
    POOL_SLOTS: tl.constexpr = POOL[1]
    RING_PAGE: tl.constexpr = POOL[2]
    RING_ROWS: tl.constexpr = POOL[3]
    negative = number < 0
    if GROUP > 1:
        number = tl.where(negative, number, number // GROUP)
    slot = number
    bad = negative & False
    if POOL_ROWS > 0:
        inside = number % POOL_ROWS
        bad = (number >= 0) & (inside >= POOL_SLOTS)
        slot = tl.where(negative | bad, number, number // POOL_ROWS * POOL_SLOTS + inside)
    if p_map is not None:
        unmapped = (number >= 0) & (bad == 0) & (slot >= map_length)
        usable = (negative | bad | unmapped) == 0
        slot = tl.where(usable, tl.load(p_map + slot, mask=m & usable, other=0).to(tl.int64), slot)
        bad = bad | unmapped
    if RING_PAGE > 0:
        slot = tl.where(bad | (slot < 0), slot, slot // RING_PAGE * RING_ROWS + slot % RING_ROWS)
    null = (bad == 0) & ((slot < 0) | ((slot >= null_first) & (slot < null_end)))
    bad = bad | (slot >= slots)
    status = tl.where(bad, STATUS_RANGE, tl.where(null, STATUS_NULL, STATUS_OK))
    return slot, status


@triton.jit
def lookup(
    p_table, row_first, position, width, extent, p_map, map_length, slots, null_first, null_end, m,
    PAGE_SIZE: tl.constexpr, RING: tl.constexpr, POOL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`ops.torch.plan.lookup`: slot and status of int64 positions, of the table row from element ``row_first`` on."""
    element, column, present = find_entry(row_first, position, width, extent, PAGE_SIZE, RING, GROUP)
    entry = tl.load(p_table + element, mask=m & present, other=-1)
    slot, status = resolve_entry(
        entry, column, p_map, map_length, slots, null_first, null_end, m & present, PAGE_SIZE, POOL, GROUP
    )  # fmt: skip
    slot = tl.where(present, slot, -1)
    status = tl.where(present, status, STATUS_RANGE)
    return slot, status


@triton.jit
def find_entry(
    row_first, position, width, extent,
    PAGE_SIZE: tl.constexpr, RING: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The element of a table with the entry of each position, the position's column, and whether the element exists."""
    column = position.to(tl.int64)
    if GROUP > 1:
        column = (column + 1) * GROUP - 1
    if RING > 0:
        column = column % RING
    page = column // PAGE_SIZE
    element = row_first + page
    return element, column, (page < width) & (element >= 0) & (element < extent)


@triton.jit
def resolve_entry(
    entry, column, p_map, map_length, slots, null_first, null_end, m,
    PAGE_SIZE: tl.constexpr, POOL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Slot and status of the entries of a table."""
    entry = entry.to(tl.int64)
    number = tl.where(entry >= 0, entry * PAGE_SIZE + column % PAGE_SIZE, entry)
    return resolve(number, p_map, map_length, slots, null_first, null_end, m, POOL, GROUP)


@triton.jit
def readable(prefix, new, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """Number of positions before ``prefix`` read by a forward of ``new`` tokens, in a region with a window, or in a
    ring, where only a forward that completes a group reads. In the type of ``prefix``."""
    count = tl.minimum(prefix, WINDOW - 1)
    if ALIGN > 0:
        end = prefix + tl.maximum(new, 0).to(prefix.dtype)
        begun = tl.minimum(prefix, prefix % ALIGN + (WINDOW - 1))
        count = tl.where(end // ALIGN > prefix // ALIGN, begun, 0)
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
    p_counters, p_ring, ring_rows, kind, m, region, source, slot, position, token, stored_token, stored_position,
    stored_value, found_value, writer, stored_writer, step_written, freed, step,
):  # fmt: skip
    """Counts the findings where ``m`` and keeps rows of as many as the ring has room for. Blocks of one shape."""
    tl.atomic_add(p_counters + kind, 1, mask=m)
    number = tl.atomic_add(p_counters + COUNT_ROWS + tl.zeros_like(kind), 1, mask=m)
    drained = tl.load(p_counters + COUNT_DRAINED)
    keep = m & (number - drained < ring_rows)
    p_row = p_ring + (number % ring_rows) * RING_WORDS
    # A loop with one store, not a store for each word: Triton takes as long for sixteen as for the rest of a kernel.
    for word in range(RING_WORDS):
        value = number + 1
        value = tl.where(word == ROW_KIND, kind, value)
        value = tl.where(word == ROW_REGION, region, value)
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
    p_counters, p_ring, ring_rows, kind, m, region, source, slot, position, token, p_record, usable, stored_value,
    found_value, writer, step,
):  # fmt: skip
    """`report` with the fields of each slot's record at ``p_record``; -1 where there is none (``usable`` false)."""
    m_record = m & usable
    first = tl.load(p_record, mask=m_record, other=-1)
    written = tl.load(p_record + 2, mask=m_record, other=-1)
    freed = tl.load(p_record + 3, mask=m_record, other=-1)
    stored_token, stored_position = split_head(first)
    step_written, stored_writer = split_head(written)
    report(
        p_counters, p_ring, ring_rows, kind, m, region, source, slot, position, token, stored_token, stored_position,
        stored_value, found_value, writer, stored_writer, step_written, freed, step,
    )  # fmt: skip
