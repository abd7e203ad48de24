"""Rows of the op ``repair``, one a damaged word: the finding and the outcome. int64 ``[n, REPAIR_WORDS]``.

| word        | set by | meaning                                                                       |
|-------------|--------|-------------------------------------------------------------------------------|
| SLOT        | host   | the damaged slot                                                              |
| SOURCE      | host   | index of the source among the region's                                        |
| STORED      | host   | the recorded fingerprint, as the finding has it                               |
| FOUND       | host   | fingerprint of the bytes that the finding saw                                 |
| WRITTEN     | host   | the record's step of the last write, as the finding has it                    |
| POSITION    | host   | the record's position, as the finding has it                                  |
| OUTCOME     | device | see `RepairOutcome`                                                           |
| WORD        | device | index of the word within the slot, -1 where none is known                     |
| OLD, DAMAGED | device | the word as it was written, and as it was found                              |
| STEP        | device | number of the last forward then                                               |
"""

from enum import IntEnum

REPAIR_WORDS = 12

MOST_FLIPPED_BITS = 4
"""Most bits of a word that differ, unless all are in one byte. By chance one change of several words in 2**32 looks,
for a given word of the slot, as if that one had changed alone; one in 10**5 of these is so near to the present word,
but where only the highest bits of words changed: then all are."""


class RepairWord(IntEnum):
    """Index into a row."""

    SLOT = 0
    SOURCE = 1
    STORED = 2
    FOUND = 3
    WRITTEN = 4
    POSITION = 5
    OUTCOME = 6
    WORD = 7
    OLD = 8
    DAMAGED = 9
    STEP = 10


class RepairOutcome(IntEnum):
    """Outcome for a damaged word. Only with `REPAIRED` are the slot's bytes other than before."""

    ASKED = 0
    """Not looked at yet."""
    PUT = 1
    """The old word is in its place, and the fingerprint is not compared yet."""
    REPAIRED = 2
    """The old word is in its place, and the slot has the recorded fingerprint."""
    FAILED = 3
    """The old word was put in its place and the fingerprint is another one: the damaged word is back."""
    LIVE = 4
    """A request has the slot."""
    MOVED_ON = 5
    """The slot was freed, written again, or has another record."""
    CHANGED = 6
    """The bytes are not those of the finding any more."""
    UNCLEAR = 7
    """No single word with few flipped bits explains the fingerprint, or several do."""


def is_flip(changed: int) -> bool:
    """Whether ``changed``, the bits of a word that differ, look like damage of memory, not like another number."""
    return changed.bit_count() <= MOST_FLIPPED_BITS or any(changed & ~(0xFF << at) == 0 for at in (0, 8, 16, 24))
