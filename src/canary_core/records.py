"""Every byte layout shared by kernels, torch reference and host. Nothing else spells out an index.

Record: 8 int32 words (32 bytes, one memory sector) a slot, row-major in an int32 tensor ``[slots, 8]``:

| word | constant        | content                                                                    |
|------|-----------------|----------------------------------------------------------------------------|
| 0    | `TOKEN`         | token id                                                                   |
| 1    | `POSITION`      | ``position * 32 + state``                                                  |
| 2, 3 | `PREFIX_HASH`   | prefix hash up to and including the token, int64 little endian             |
| 4    | `STEP_WRITTEN`  | step of the forward that wrote the slot                                    |
| 5    | `WRITER`        | writer id of the request that wrote the slot                               |
| 6    | `STEP_FREED`    | step at which the slot was freed or parked, 0 for neither                  |
| 7    | `FREED_BY`      | writer id of the request that freed or parked the slot                     |

All zeros read as *unwritten*. Beside the records lie the fingerprints, int64 ``[slots, sources]``. A fingerprint of 0
means unknown bytes, whatever the record says: nothing is compared. Real bytes come to 0 once in 2**64, and go unchecked
then, without a false finding. Null slots have no fingerprints; `NullBytes` stands in their place after the first look.

Payload: facts that travel with a slot's bytes, int64 little endian ``[slots, PAYLOAD_FINGERPRINTS + sources]``:

| word    | constant               | content                                                                   |
|---------|------------------------|---------------------------------------------------------------------------|
| 0       | `PAYLOAD_STAMP`        | ``digest * 2**32 + origin``: the row's meaning (31 bits), its maker (32)   |
| 1 to 4  | `PAYLOAD_RECORD`       | the record, as above                                                      |
| 5 to ...| `PAYLOAD_FINGERPRINTS` | one fingerprint for each source, 0 where the slot has no bytes            |

The digest is of `PAYLOAD_VERSION` and each source's name, chunks and chunk bytes, in order. All zeros: nothing known.

Block row: `gather_blocks`' summary of some slots in sequence order, int64 ``[BLOCK_VALUES + sources]``:

| word  | constant       | content                                                                       |
|-------|----------------|-------------------------------------------------------------------------------|
| 0     | `BLOCK_HASH`   | prefix hash of the last slot                                                   |
| 1     | `BLOCK_SUM`    | sum of the mixes of all tokens: the growth of the prefix hash within the block  |
| 2     | `BLOCK_FLAGS`  | see `Block`                                                                    |
| 3     | `BLOCK_SLOT`   | number of the first slot                                                       |
| 4     | `BLOCK_WHO`    | ``writer * 2**32 + position`` of the first slot's record, 0 for no slot         |
| 5 ... | `BLOCK_VALUES` | one value for each source: the slots' fingerprints, each times an odd weight    |

Sample: the token sampled for a request and a position, one int64, 0 for nothing:

| bits     | constant                | content                                                                    |
|----------|-------------------------|----------------------------------------------------------------------------|
| 0 to 21  | `SAMPLE_TOKEN_BITS`     | token id                                                                   |
| 22 to 42 | `SAMPLE_POSITION_BITS`  | position, never 0: a prompt has a token                                    |
| 43 to 62 | `SAMPLE_WRITER_BITS`    | writer id modulo ``2**20``                                                 |

One word, so that no reader sees the token of one request and the position of another. Larger tokens and positions are
not remembered. A request's last `SAMPLE_TOKENS` are kept at ``writer % SAMPLE_WRITERS * SAMPLE_TOKENS + position %
SAMPLE_TOKENS``.

History: the last `HISTORY` events of a slot, newest first, one int64 each, 0 for nothing; int64 ``[slots + 1,
HISTORY]`` (32 bytes, one memory sector). The last row has the events of all slots at once:

| bits     | constant              | content                                                                      |
|----------|-----------------------|------------------------------------------------------------------------------|
| 0 to 3   | `HISTORY_EVENT_BITS`  | the event, see `Happened`                                                    |
| 4 to 33  | `HISTORY_NUMBER_BITS` | writer id modulo ``2**30``, all ones for nobody; of a copy the source slot   |
| 34 to 63 | `HISTORY_NUMBER_BITS` | step modulo ``2**30``                                                        |

The newest entry is replaced when the same request does the same again, or when one more request shares the slot: a
state written by every forward has one entry.

Violation row: `ROW_WORDS` int64, see `Row`. Counters: one int64 each, see `Counter`.
"""

from enum import IntEnum

RECORD_WORDS = 8
TOKEN, POSITION, PREFIX_HASH, STEP_WRITTEN, WRITER, STEP_FREED, FREED_BY = 0, 1, 2, 4, 5, 6, 7
"""First int32 word of each record field."""

STATES = 32
"""Values of a record's state: the five low bits of the position word. With the sign, 26 bits are left for positions."""

CONTENT = 3
"""The bits of a state for a slot's content, independent of owners."""

PAYLOAD_STAMP, PAYLOAD_RECORD, PAYLOAD_FINGERPRINTS = 0, 1, 5
"""First int64 word of each part of a payload row."""

PAYLOAD_VERSION = 3
"""Counts up when the meaning of a payload, a record or a fingerprint changes."""

BLOCK_HASH, BLOCK_SUM, BLOCK_FLAGS, BLOCK_SLOT, BLOCK_WHO, BLOCK_VALUES = 0, 1, 2, 3, 4, 5
"""First int64 word of each part of a block row."""


class Block(IntEnum):
    """Bits of a block row's flags: known facts about the block."""

    TOKENS = 1
    """All slots were written, with consecutive positions from a block's start on: `BLOCK_SUM` holds."""
    PREFIX = 2
    """All prefix hashes are known, and each follows from the one before: `BLOCK_HASH` holds."""
    BYTES = 4
    """The fingerprints of all slots are known in all sources: the values hold."""
    OUTSIDE = 8
    """A number is no slot of the region, or a null slot."""
    REWRITTEN = 16
    """Of an arrived block: a forward has written to a slot since; set by the gatherer."""

    @classmethod
    def whole(cls) -> int:
        """The flags of a completely known block."""
        return cls.TOKENS | cls.PREFIX | cls.BYTES


class State(IntEnum):
    """A slot's state as known to Canary. `UNWRITTEN` must stay 0: a zeroed record table means nothing was written."""

    UNWRITTEN = 0
    WRITTEN = 1
    ALLOCATED = 2
    """Handed out by the allocator and not written yet."""
    UNKNOWN = 3
    """Bytes arrived without a forward and without records; the slot is not judged until rewritten."""
    FREED = 4
    """A bit: given back to the allocator. The lower bits keep the state before."""
    PARKED = 8
    """A bit: kept by the prefix cache without a request. The two lowest bits say what the slot holds."""
    ARRIVED = 16
    """A bit: the content came by a copy or a load; the writer wrote it elsewhere."""

    @classmethod
    def of(cls, word: int) -> "State":
        """The state in a record's position word."""
        if word & cls.FREED:
            return cls.FREED
        return cls.PARKED if word & cls.PARKED else cls(word & CONTENT)


UNPARKED = STATES - 1 - State.PARKED - State.ARRIVED
"""The bits of a state that matter to a reader: reading a parked slot, or the target of a copy, is as legal as reading a
request's own slot."""


FIRST_CONTENT = 1 << 30
"""Token ids from here on are numbers of content in the place of tokens, see `Contents`. No vocabulary is as large."""

HISTORY, HISTORY_EVENT_BITS, HISTORY_NUMBER_BITS = 4, 4, 30


class Happened(IntEnum):
    """Events of a slot; never 0, the empty entry. The lower-case names are those of `SlotEvents`."""

    ALLOC = 1
    SHARE = 2
    PARK = 3
    EVICT = 4
    FREE = 5
    WRITE = 6
    """A forward wrote the slot."""
    COPY = 7
    """Another slot was copied to the slot."""
    ARRIVE = 8
    """Bytes arrived from elsewhere, with records or with known tokens."""
    FORGET = 9
    CLEAR = 10


class NullBytes(IntEnum):
    """State of a null slot's source at the last look. Any other number: never looked at since attach, or since the slot
    was forgotten."""

    FINITE = 1
    NOT_FINITE = 2
    """NaN or infinity, reported or there from the start."""


class Kind(IntEnum):
    """Kinds of findings; `canary_core.kinds` has a file for each. The value is the index of its counter."""

    SLOT_RANGE = 0
    """A table names a slot beyond the region."""
    NULL_SLOT = 1
    """A live token is read from, or written to, the null (padding) slot."""
    UNWRITTEN = 2
    """A forward will read a slot never written by a forward."""
    FREED = 3
    """A forward will read a freed slot, or a request shares one."""
    POSITION = 4
    """The slot holds another position than the position read from it."""
    TOKEN = 5
    """The slot holds another token than the request's own."""
    PREFIX = 6
    """The slot's prefix is not the prefix of the slot before: the slot belongs to another sequence."""
    BYTES = 7
    """The slot's bytes changed since they were recorded."""
    LOST_WRITE = 8
    """A forward should have written the slot, and its bytes are the same as before."""
    WRITE_INPUT = 9
    """A forward was given another token or position than the request's own."""
    WRITE_SLOT = 10
    """A forward writes a token to another slot than the table names for reading."""
    TWO_WRITERS = 11
    """Two tokens of one batch are written to the same slot."""
    NON_FINITE = 12
    """A float KV value just written, or a float in the null slot, is NaN or infinite."""
    DOUBLE_FREE = 13
    """A free or parked slot was given back again."""
    DOUBLE_ALLOC = 14
    """The allocator handed out a slot in use, or a parked one."""
    WRITE_AFTER_FREE = 15
    """A forward wrote a freed slot before the allocator handed it out again."""
    CACHE_STRUCTURE = 16
    """The prefix cache contradicts itself, its allocator or its window map."""
    EVICTED_IN_USE = 17
    """The prefix cache gave up a slot of a running request."""
    ARRIVAL = 18
    """Bytes that came back without a forward differ from the bytes stored for the prefix."""
    RECOMPUTE = 19
    """The cache holds other KV than the model computes from the request's tokens."""
    WEIGHTS = 20
    """Bytes of a parameter changed, and nobody has updated it."""
    READ_LENGTH = 21
    """A length given to attention is not the one that the forward's request has."""
    READ_TABLE = 22
    """The table given to attention names another slot than the engine's own table."""
    RANKS = 23
    """Ranks that must compute the same have not."""
    ATTENTION = 24
    """A layer's attention computes something else than the model's configuration says."""


PROBE = 25
"""In the place of a `Kind`: no finding. The scrub compared a slot's bytes with a purposely wrong fingerprint, as proof
to the host that a finding would be told."""


class Counter(IntEnum):
    """Index into the device's int64 counters. Indices below `FIRST` are the per-kind violation counts."""

    FIRST = 26
    ROWS = 26
    """Violation rows ever reserved in the ring (written or dropped)."""
    DRAINED = 27
    """Rows the host has taken; set by the host. A row is kept while ``ROWS - DRAINED < ring rows``, or among the first
    `KIND_ROWS` of its kind since."""
    CHECKED_SLOTS = 28
    """Slots whose mapping was checked."""
    CHECKED_BYTES = 29
    """Bytes with a compared fingerprint: by read checks, scrub and on demand (`SlotEvents.check`)."""
    RECORDED_SLOTS = 30
    """Slots recorded after a forward. On the device each region has its own count, see `RECORDED`; the host adds them
    up."""
    RECORDED_BYTES = 31
    """Bytes fingerprinted after a forward."""
    UNKNOWN_SLOTS = 32
    """Slots skipped by a check because their bytes arrived without records."""
    UNSURE = 33
    """Uncertain suspicions, e.g. bytes unchanged by a write of the same token; never reported."""
    CHECKED_FORWARDS = 34
    """Forwards whose mapping check ran, counted by the check itself: the proof of life."""
    SCRUBBED_SLOTS = 35
    """Slots passed by the scrub in search of running requests: divided by the region's slots, the number of rounds."""
    SAMPLED_TOKENS = 36
    """Tokens computed or read by a forward, and compared with the sampler's."""
    UNFIT_ROWS = 37
    """Slots that came with records of another layout, or fingerprinted with other keys: not judged."""
    SHARED_SLOTS = 38
    """Of `CHECKED_SLOTS`, those left by a row to another row with the same table, see `canary_core.ops.readers`."""


KINDS_DRAINED = 40
"""Index of ``FIRST`` counters behind those of `Counter`: findings of each kind at the host's last look at the ring."""

COUNTERS = KINDS_DRAINED + Counter.FIRST
"""Index of the first gauge, behind the counters: `GAUGES` words for each region. The first `SCRUB_GAUGES` are the
scrub's progress: the words from `ScrubWord.RUNNING` on. The word at `RECORDED` counts slots recorded after a
forward."""

SCRUB_GAUGES, RECORDED, GAUGES = 4, 4, 5


class Clock(IntEnum):
    """Index into a Canary's int64 clock. Two copies of the step keep every launch free of races: `check` reads `STEP`
    and writes `NEXT`; ops after the forward read `NEXT`, and `record`, the last of them, writes `STEP`."""

    STEP = 0
    NEXT = 1


CLOCK_WORDS, CURSOR_WORDS, SCRUB_WORDS = 2, 25, 8
"""Words of a clock, of a region's cursors, and of these for a scrub."""


class Cursor(IntEnum):
    """Index into a region's int64 cursors. A cursor moves before or after the launch that starts from it, never within:
    the programs of a launch run at the same time."""

    READ = 0
    """First tile, in batch order, of the read check."""
    READ_TILES = 1
    """Most tiles of one read check, 0: none; set by the host."""
    CHECK = 2
    """First tile, in batch order, of the mapping check."""
    CHECK_NEXT = 3
    """The same for the next forward: written by `check`, copied to `CHECK` by `record`."""
    CHECK_TILES = 4
    """Most tiles of one mapping check; set by the host."""
    SCRUB_SLOTS = 5
    """Most slots compared by one scrub, which has room for `RegionState.listed_slots`; set by the host."""
    SCRUB_RUNNING = 6
    """Slots of running requests in a scrub before parked slots have a turn; set by the host."""
    SCRUB_PASS = 7
    """Most slots passed in search of one sort, per scrub; set by the host."""
    SCRUB = 8
    """`SCRUB_WORDS` words, see `ScrubWord`: `SCRUB_NEXT`, copied by `check`."""
    SCRUB_NEXT = 16
    """The same for the next scrub: written by `scrub`, which need not run after each forward."""
    PROBE = 24
    """Number of a source plus one, 0 for none: a probed scrub inverts all bits of that source's fingerprint of the
    first slot on its list, see `records.PROBE`. Set by the host."""


class ScrubWord(IntEnum):
    """Progress of a region's scrub: index into the words at `Cursor.SCRUB`. Slots are passed in physical order, round
    after round, by one cursor for each sort; numbers count on and are places modulo the slots."""

    LIST = 0
    """``half * 2**32 + slots``: the list to compare, in the first or second half of `RegionState.listed`. The other
    half takes the next list meanwhile."""
    RUNNING = 1
    """Slots passed in search of requests' slots."""
    RUNNING_LISTED = 2
    """Number of requests' slots listed."""
    PARKED = 3
    """Slots passed in search of parked ones."""
    PARKED_LISTED = 4


ALL_TILES = 1 << 40
"""A budget without a limit."""

CHECK_TILE, READ_TILE = 512, 32
"""Slots of one row taken or left together by the mapping check, and by a read check."""

PLAN_RECORD = 4
PLAN_WORDS = PLAN_RECORD + RECORD_WORDS // 2
"""Write plan, int64 ``[tokens, 8]``: filled by `check`, used by the ops after the forward. Word 0 is ``(status + 1) *
2**32 + row`` (see `Status`), 0 where nothing is stored; word 1 the slot, word 2 the position, word 3 the table's slot,
-1 for none or where the engine has no list of its own. `record` must not look the slot up: an engine that schedules
ahead may rewrite its tables while the forward runs. From word `PLAN_RECORD` on: the slot's record as before the
forward, 0 where the status is not OK; so `fingerprint` need not come before `record`."""


class Status(IntEnum):
    """Verdict on a slot number of a table."""

    OK = 0
    RANGE = 1
    """No slot of the region."""
    NULL = 2
    """The null slot, or padding."""


CHAINS = 65536
"""Entries of a region's chain table, int64 ``[CHAINS, 2]``: (``writer * 2**32 + length``, prefix hash there), at
``writer % CHAINS``: the end of each request's sequence, so that a whole foreign row is noticed."""

CLAIM_TOKEN_BITS = 24
"""A claim of a slot for writing is ``step << CLAIM_TOKEN_BITS | token index + 1``: the last of a forward's tokens wins,
and a later forward wins over an earlier one, for 2**39 steps. (`check` counts fewer than 2**21 new tokens a forward.)
"""

SAMPLE_WRITERS, SAMPLE_TOKENS = 4096, 16
"""Of how many requests the sampled tokens are remembered, and how many of each. Requests with the same remainder push
each other out."""

SAMPLE_TOKEN_BITS, SAMPLE_POSITION_BITS, SAMPLE_WRITER_BITS = 22, 21, 20

TAIL_WORDS = 3
"""Words noted by `check` for each of the last `SAMPLE_TOKENS` positions read by a row, for `record` to compare: a
sample without its writer, 0 for nothing; the slot; and the record's words `STEP_WRITTEN` and `WRITER` as one number."""

NO_SAMPLE, NOT_SAMPLED = -1, -2
"""In the place of a token: nothing was sampled for the position, and an earlier sample is void; the position is left as
known."""

DESCRIPTOR_WORDS = 12


class Descriptor(IntEnum):
    """Word of a source's descriptor (int64 each): `KVSource` for kernels."""

    ADDRESS = 0
    PAGE_SIZE = 1
    PAGE_STRIDE = 2
    SLOT_STRIDE = 3
    CHUNKS = 4
    CHUNK_STRIDE = 5
    CHUNK_BYTES = 6
    PRESENT = 7
    """Slots of a page with bytes."""
    SURE = 8
    """1 where other bytes are certain when another token is written: `LOST_WRITE` is judged."""
    EXPONENT = 9
    """Exponent bits of each float in a 32-bit word, 0 where the non-finite check is left out."""
    INCREMENT = 10
    """Lowest exponent bit of each float: ``(word & EXPONENT) + INCREMENT`` carries into `CARRY` where all are set."""
    CARRY = 11


LOST_WRITE_BYTES = 32
"""Smallest slot of a source judged for `LOST_WRITE`: fewer bytes may repeat by chance."""

ROW_WORDS, KIND_ROWS = 16, 8
"""Words of a violation row; and rows of each kind kept behind the ring where that is full, so that many findings of one
kind do not hide another."""


class Row(IntEnum):
    """Word of a violation row (int64 each)."""

    SEQUENCE = 0
    """Number of the row since start, plus one: tells a fresh row from a stale one."""
    KIND = 1
    REGION = 2
    SOURCE = 3
    """Index of the source, -1 where the finding is not about bytes."""
    SLOT = 4
    POSITION = 5
    """Position of the read or write, -1 for the scrub."""
    TOKEN = 6
    """Token the request expects there, -1 if unknown."""
    STORED_TOKEN = 7
    """Of the record; for `READ_LENGTH` the number of the lengths' name."""
    STORED_POSITION = 8
    """The record's position word: ``position * 32 + state``."""
    STORED_VALUE = 9
    """Recorded prefix hash or fingerprint; for `WRITE_SLOT` and `READ_TABLE` the slot of the engine's table, for
    `READ_LENGTH` the expected length; for `TWO_WRITERS` the winner's token index; for `WRITE_INPUT`, and `TOKEN` after
    a forward, the token that was sampled, -1 for none."""
    FOUND_VALUE = 10
    """The prefix hash or fingerprint found; for `READ_TABLE` the number of the table's name, for `READ_LENGTH` the
    given length."""
    WRITER = 11
    """Writer id of the reading or writing request, -1 for the scrub."""
    STORED_WRITER = 12
    STEP_WRITTEN = 13
    FREED = 14
    """The record's words `STEP_FREED` and `FREED_BY` as one number: ``freed by * 2**32 + step``."""
    STEP = 15
    """``step * 8 + phase`` of the check."""


class Phase(IntEnum):
    """The check that raised a finding."""

    PRE_FORWARD = 0
    POST_FORWARD = 1
    SCRUB = 2
    SWEEP = 3
    EVENT = 4
