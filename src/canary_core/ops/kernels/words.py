"""Numbers of `canary_core.records` under the names that kernels know them by: a kernel sees globals only as constexpr.

Kernels import each name by itself. Triton's cache tells kernels apart by the globals that their code names, but not by
attributes of a module: with those, a changed layout would go on with kernels compiled for the old one.
"""

import triton.language as tl

from canary_core.records import (
    CHAINS,
    CLAIM_TOKEN_BITS,
    CONTENT,
    COUNTERS,
    DESCRIPTOR_WORDS,
    FIRST_CONTENT,
    GAUGES,
    KIND_ROWS,
    KINDS_DRAINED,
    PLAN_RECORD,
    PLAN_WORDS,
    POSITION,
    PROBE,
    RECORD_WORDS,
    RECORDED,
    ROW_WORDS,
    SCRUB_WORDS,
    STATES,
    UNPARKED,
    Clock,
    Counter,
    Cursor,
    Descriptor,
    Happened,
    Kind,
    Phase,
    Row,
    ScrubWord,
    State,
    Status,
)

RECORD = tl.constexpr(RECORD_WORDS)
"""int32 words of a slot's record."""
RECORD_POSITION = tl.constexpr(POSITION)
CHAIN_ENTRIES = tl.constexpr(CHAINS)

STATE_VALUES = tl.constexpr(STATES)
UNWRITTEN = tl.constexpr(int(State.UNWRITTEN))
WRITTEN = tl.constexpr(int(State.WRITTEN))
ALLOCATED = tl.constexpr(int(State.ALLOCATED))
UNKNOWN = tl.constexpr(int(State.UNKNOWN))
FREED = tl.constexpr(int(State.FREED))
PARKED = tl.constexpr(int(State.PARKED))
NOT_PARKED = tl.constexpr(~int(State.PARKED))
ARRIVED = tl.constexpr(int(State.ARRIVED))
CONTENT_BITS = tl.constexpr(CONTENT)
READ_STATE = tl.constexpr(UNPARKED)
READ_WORD = tl.constexpr(UNPARKED - STATES)

CONTENT_TOKENS = tl.constexpr(FIRST_CONTENT)

PLAN = tl.constexpr(PLAN_WORDS)
"""int64 words of a token's entry in the plan."""
PLANNED_RECORD = tl.constexpr(PLAN_RECORD)
CLAIM_BITS = tl.constexpr(CLAIM_TOKEN_BITS)
CLAIM_TOKENS = tl.constexpr((1 << CLAIM_TOKEN_BITS) - 1)
STATUS_OK = tl.constexpr(int(Status.OK))
STATUS_RANGE = tl.constexpr(int(Status.RANGE))
STATUS_NULL = tl.constexpr(int(Status.NULL))

CLOCK_STEP = tl.constexpr(int(Clock.STEP))
CLOCK_NEXT = tl.constexpr(int(Clock.NEXT))

CURSOR_CHECK = tl.constexpr(int(Cursor.CHECK))
CURSOR_CHECK_NEXT = tl.constexpr(int(Cursor.CHECK_NEXT))
CURSOR_CHECK_TILES = tl.constexpr(int(Cursor.CHECK_TILES))
CURSOR_READ = tl.constexpr(int(Cursor.READ))
CURSOR_READ_TILES = tl.constexpr(int(Cursor.READ_TILES))
CURSOR_PROBE = tl.constexpr(int(Cursor.PROBE))
CURSOR_SCRUB = tl.constexpr(int(Cursor.SCRUB))
CURSOR_SCRUB_NEXT = tl.constexpr(int(Cursor.SCRUB_NEXT))
CURSOR_SCRUB_SLOTS = tl.constexpr(int(Cursor.SCRUB_SLOTS))
CURSOR_SCRUB_RUNNING = tl.constexpr(int(Cursor.SCRUB_RUNNING))
CURSOR_SCRUB_PASS = tl.constexpr(int(Cursor.SCRUB_PASS))

SCRUB_PLACE = tl.constexpr(SCRUB_WORDS)
"""Words of a place of the scrub, from `CURSOR_SCRUB` on."""
PLACE_LIST = tl.constexpr(int(ScrubWord.LIST))
PLACE_RUNNING = tl.constexpr(int(ScrubWord.RUNNING))
PLACE_RUNNING_LISTED = tl.constexpr(int(ScrubWord.RUNNING_LISTED))
PLACE_PARKED = tl.constexpr(int(ScrubWord.PARKED))
PLACE_PARKED_LISTED = tl.constexpr(int(ScrubWord.PARKED_LISTED))

COUNT_ROWS = tl.constexpr(int(Counter.ROWS))
COUNT_DRAINED = tl.constexpr(int(Counter.DRAINED))
COUNT_CHECKED_SLOTS = tl.constexpr(int(Counter.CHECKED_SLOTS))
COUNT_SHARED_SLOTS = tl.constexpr(int(Counter.SHARED_SLOTS))
COUNT_CHECKED_FORWARDS = tl.constexpr(int(Counter.CHECKED_FORWARDS))
COUNT_CHECKED_BYTES = tl.constexpr(int(Counter.CHECKED_BYTES))
COUNT_RECORDED_BYTES = tl.constexpr(int(Counter.RECORDED_BYTES))
COUNT_SAMPLED_TOKENS = tl.constexpr(int(Counter.SAMPLED_TOKENS))
COUNT_SCRUBBED_SLOTS = tl.constexpr(int(Counter.SCRUBBED_SLOTS))
COUNT_UNKNOWN_SLOTS = tl.constexpr(int(Counter.UNKNOWN_SLOTS))
COUNT_UNSURE = tl.constexpr(int(Counter.UNSURE))
COUNT_KINDS_DRAINED = tl.constexpr(KINDS_DRAINED)
COUNTERS_END = tl.constexpr(int(COUNTERS))
REGION_GAUGES = tl.constexpr(GAUGES)
"""Words after the counters for each region."""
GAUGE_RECORDED = tl.constexpr(RECORDED)

KIND_SLOT_RANGE = tl.constexpr(int(Kind.SLOT_RANGE))
KIND_NULL_SLOT = tl.constexpr(int(Kind.NULL_SLOT))
KIND_UNWRITTEN = tl.constexpr(int(Kind.UNWRITTEN))
KIND_FREED = tl.constexpr(int(Kind.FREED))
KIND_POSITION = tl.constexpr(int(Kind.POSITION))
KIND_TOKEN = tl.constexpr(int(Kind.TOKEN))
KIND_PREFIX = tl.constexpr(int(Kind.PREFIX))
KIND_BYTES = tl.constexpr(int(Kind.BYTES))
KIND_LOST_WRITE = tl.constexpr(int(Kind.LOST_WRITE))
KIND_WRITE_INPUT = tl.constexpr(int(Kind.WRITE_INPUT))
KIND_WRITE_SLOT = tl.constexpr(int(Kind.WRITE_SLOT))
KIND_TWO_WRITERS = tl.constexpr(int(Kind.TWO_WRITERS))
KIND_NON_FINITE = tl.constexpr(int(Kind.NON_FINITE))
KIND_DOUBLE_FREE = tl.constexpr(int(Kind.DOUBLE_FREE))
KIND_DOUBLE_ALLOC = tl.constexpr(int(Kind.DOUBLE_ALLOC))
KIND_WRITE_AFTER_FREE = tl.constexpr(int(Kind.WRITE_AFTER_FREE))
KIND_EVICTED_IN_USE = tl.constexpr(int(Kind.EVICTED_IN_USE))
KIND_READ_LENGTH = tl.constexpr(int(Kind.READ_LENGTH))
KIND_READ_TABLE = tl.constexpr(int(Kind.READ_TABLE))
KIND_PROBE = tl.constexpr(PROBE)

PHASE_PRE = tl.constexpr(int(Phase.PRE_FORWARD))
PHASE_POST = tl.constexpr(int(Phase.POST_FORWARD))
PHASE_SCRUB = tl.constexpr(int(Phase.SCRUB))
PHASE_EVENT = tl.constexpr(int(Phase.EVENT))

RING_WORDS = tl.constexpr(ROW_WORDS)
RING_KIND_ROWS = tl.constexpr(KIND_ROWS)
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

SOURCE_FIELDS = tl.constexpr(DESCRIPTOR_WORDS)
"""Words of a source's descriptor."""
SOURCE_ADDRESS = tl.constexpr(int(Descriptor.ADDRESS))
SOURCE_PAGE_SIZE = tl.constexpr(int(Descriptor.PAGE_SIZE))
SOURCE_PAGE_STRIDE = tl.constexpr(int(Descriptor.PAGE_STRIDE))
SOURCE_SLOT_STRIDE = tl.constexpr(int(Descriptor.SLOT_STRIDE))
SOURCE_CHUNKS = tl.constexpr(int(Descriptor.CHUNKS))
SOURCE_CHUNK_STRIDE = tl.constexpr(int(Descriptor.CHUNK_STRIDE))
SOURCE_CHUNK_BYTES = tl.constexpr(int(Descriptor.CHUNK_BYTES))
SOURCE_PRESENT = tl.constexpr(int(Descriptor.PRESENT))
SOURCE_SURE = tl.constexpr(int(Descriptor.SURE))
SOURCE_EXPONENT = tl.constexpr(int(Descriptor.EXPONENT))
SOURCE_INCREMENT = tl.constexpr(int(Descriptor.INCREMENT))
SOURCE_CARRY = tl.constexpr(int(Descriptor.CARRY))

EVENT_ALLOC = tl.constexpr(int(Happened.ALLOC))
EVENT_SHARE = tl.constexpr(int(Happened.SHARE))
EVENT_PARK = tl.constexpr(int(Happened.PARK))
EVENT_EVICT = tl.constexpr(int(Happened.EVICT))
EVENT_WRITE = tl.constexpr(int(Happened.WRITE))
