"""`Link`: a thing in common between two findings of one cause; `CauseRow`: links from a cause to effects."""

from collections.abc import Mapping, Set
from enum import Enum

from canary_core.records import Kind


class Link(Enum):
    """A thing in common between two findings of one cause."""

    SLOT = "slot"
    """The same slot of the same region."""
    PAGE = "page"
    """The same page of the same region, or a neighbour."""
    REQUEST = "request"
    """The reading or writing request, or the writer of the content read; of changed bytes only the writer."""
    STEP = "step"
    """The same forward."""
    CONTENT = "content"
    """One slot has the bytes of the other."""
    LAYER = "layer"
    """The same layer is the first one that is computed otherwise, in the same way, of whatever request."""


NEAR_STEPS = {
    Link.SLOT: 1024, Link.PAGE: 1024, Link.CONTENT: 1024, Link.LAYER: 1024, Link.REQUEST: 64, Link.STEP: 1
}  # fmt: skip
"""Forwards after an incident's last finding until the link no longer holds."""

CauseRow = Mapping[Kind, Set[Link]]
"""Kinds that may follow from a cause, each with the links to the cause."""

OWNERS = frozenset({Link.SLOT, Link.PAGE})
"""Links to findings about the slot, under any owner."""

READ = OWNERS | {Link.REQUEST}
"""Links to findings of the slot's readers."""

NO_SLOT: CauseRow = {
    Kind.NULL_SLOT: frozenset({Link.STEP, Link.REQUEST}),
    **dict.fromkeys(
        (Kind.UNWRITTEN, Kind.POSITION, Kind.TOKEN, Kind.PREFIX, Kind.WRITE_SLOT), frozenset({Link.REQUEST})
    ),
}
"""Follows from a request whose table has no slot of its own."""

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
"""Consequences of a slot with two owners at a time."""
