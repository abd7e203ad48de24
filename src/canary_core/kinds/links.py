"""`Link`: what two findings of one cause share; and rows of consequences that several kinds have."""

from collections.abc import Mapping, Set
from enum import Enum

from canary_core.records import Kind


class Link(Enum):
    """What two findings of one cause share."""

    SLOT = "slot"
    """The same slot of the same region."""
    PAGE = "page"
    """The same page of the same region, or the one beside it."""
    REQUEST = "request"
    """A request that reads or writes, or the one that wrote what is read; of changed bytes only the one that wrote
    them."""
    STEP = "step"
    """The same forward."""
    CONTENT = "content"
    """One has the bytes that the other should have."""


NEAR_STEPS = {Link.SLOT: 1024, Link.PAGE: 1024, Link.CONTENT: 1024, Link.REQUEST: 64, Link.STEP: 1}
"""How many forwards after an incident's last finding something still links another one to it."""

CauseRow = Mapping[Kind, Set[Link]]
"""Kinds that may follow, and what links each to its cause."""

OWNERS = frozenset({Link.SLOT, Link.PAGE})
"""Links to findings about the slot, whoever has it."""

READ = OWNERS | {Link.REQUEST}
"""Links to findings of requests that read the slot."""

TWO_OWNERS: CauseRow = {
    Kind.DOUBLE_FREE: OWNERS,
    Kind.EVICTED_IN_USE: OWNERS,
    Kind.DOUBLE_ALLOC: OWNERS,
    Kind.WRITE_AFTER_FREE: READ,
    Kind.TWO_WRITERS: OWNERS,
    Kind.FREED: READ,
    Kind.UNWRITTEN: READ,
    Kind.POSITION: READ,
    Kind.TOKEN: READ,
    Kind.PREFIX: READ,
    Kind.LOST_WRITE: OWNERS,
    Kind.BYTES: OWNERS,
}
"""Consequences of a slot that has two owners at a time."""
