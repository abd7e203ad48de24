"""Which kind of finding follows from which, and what the two must share for that.

Read a row as: "an incident that began with this kind may bring these kinds". `CONSEQUENCES` is the table of
docs/incidents.md; its rows are ordered from causes to effects, and that order decides which finding is the root.
"""

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

_OWNERS = {Link.SLOT, Link.PAGE}
_READ = {Link.SLOT, Link.PAGE, Link.REQUEST}
_TWO_OWNERS = {
    Kind.DOUBLE_FREE: _OWNERS,
    Kind.EVICTED_IN_USE: _OWNERS,
    Kind.DOUBLE_ALLOC: _OWNERS,
    Kind.WRITE_AFTER_FREE: _READ,
    Kind.TWO_WRITERS: _OWNERS,
    Kind.FREED: _READ,
    Kind.UNWRITTEN: _READ,
    Kind.POSITION: _READ,
    Kind.TOKEN: _READ,
    Kind.PREFIX: _READ,
    Kind.LOST_WRITE: _OWNERS,
    Kind.BYTES: _OWNERS,
}
"""What a slot brings that two have at a time."""

CONSEQUENCES: dict[Kind, dict[Kind, set[Link]]] = {
    Kind.CACHE_STRUCTURE: {Kind.CACHE_STRUCTURE: {Link.STEP, Link.SLOT, Link.PAGE}, **_TWO_OWNERS},
    Kind.DOUBLE_FREE: _TWO_OWNERS,
    Kind.EVICTED_IN_USE: _TWO_OWNERS,
    Kind.DOUBLE_ALLOC: _TWO_OWNERS,
    Kind.FREED: {**_TWO_OWNERS, Kind.NON_FINITE: _OWNERS},
    Kind.WRITE_AFTER_FREE: _TWO_OWNERS,
    Kind.TWO_WRITERS: {
        Kind.TWO_WRITERS: {Link.STEP, *_OWNERS},
        Kind.POSITION: _READ,
        Kind.TOKEN: _READ,
        Kind.PREFIX: _READ,
        Kind.LOST_WRITE: _READ,
        Kind.BYTES: _OWNERS,
        Kind.UNWRITTEN: _READ,
        Kind.WRITE_SLOT: {Link.STEP, *_READ},
    },
    Kind.WRITE_INPUT: {
        Kind.WRITE_INPUT: {Link.STEP, Link.REQUEST},
        Kind.TOKEN: {Link.REQUEST},
        Kind.POSITION: {Link.REQUEST},
        Kind.PREFIX: {Link.REQUEST},
        Kind.LOST_WRITE: {Link.REQUEST},
    },
    Kind.WRITE_SLOT: {
        Kind.WRITE_SLOT: {Link.STEP, Link.REQUEST},
        Kind.UNWRITTEN: _READ,
        Kind.POSITION: _READ,
        Kind.TOKEN: _READ,
        Kind.PREFIX: _READ,
        Kind.LOST_WRITE: _READ,
        Kind.WRITE_AFTER_FREE: _READ,
        Kind.BYTES: _OWNERS,
    },
    Kind.READ_TABLE: {
        Kind.READ_TABLE: {Link.STEP, Link.REQUEST},
        Kind.SLOT_RANGE: {Link.REQUEST},
        Kind.NULL_SLOT: {Link.REQUEST},
        Kind.UNWRITTEN: {Link.REQUEST},
        Kind.FREED: {Link.REQUEST},
        Kind.POSITION: {Link.REQUEST},
        Kind.TOKEN: {Link.REQUEST},
        Kind.PREFIX: {Link.REQUEST},
        Kind.WRITE_SLOT: {Link.REQUEST},
        Kind.TWO_WRITERS: _OWNERS,
        Kind.LOST_WRITE: {Link.REQUEST},
        Kind.BYTES: _OWNERS,
    },
    Kind.SLOT_RANGE: {
        Kind.SLOT_RANGE: {Link.STEP, Link.REQUEST},
        Kind.NULL_SLOT: {Link.STEP, Link.REQUEST},
        Kind.UNWRITTEN: {Link.REQUEST},
        Kind.POSITION: {Link.REQUEST},
        Kind.TOKEN: {Link.REQUEST},
        Kind.PREFIX: {Link.REQUEST},
        Kind.WRITE_SLOT: {Link.REQUEST},
        Kind.LOST_WRITE: {Link.REQUEST},
    },
    Kind.NULL_SLOT: {
        Kind.NULL_SLOT: {Link.STEP, Link.REQUEST},
        Kind.UNWRITTEN: {Link.REQUEST},
        Kind.POSITION: {Link.REQUEST},
        Kind.TOKEN: {Link.REQUEST},
        Kind.PREFIX: {Link.REQUEST},
        Kind.WRITE_SLOT: {Link.REQUEST},
        Kind.NON_FINITE: {Link.STEP, Link.REQUEST},
    },
    Kind.ARRIVAL: {
        Kind.ARRIVAL: {Link.STEP, Link.REQUEST, *_OWNERS},
        Kind.BYTES: _OWNERS,
        Kind.NON_FINITE: _OWNERS,
    },
    Kind.LOST_WRITE: {
        Kind.LOST_WRITE: {Link.STEP, *_OWNERS},
        Kind.UNWRITTEN: _OWNERS,
        # The store went elsewhere: that slot's bytes are found a step later.
        Kind.BYTES: {Link.STEP, *_OWNERS},
    },
    Kind.UNWRITTEN: {
        Kind.UNWRITTEN: _READ,
        Kind.POSITION: _READ,
        Kind.TOKEN: _READ,
        Kind.PREFIX: _READ,
        Kind.BYTES: _OWNERS,
    },
    Kind.POSITION: {Kind.POSITION: _READ, Kind.TOKEN: _READ, Kind.PREFIX: _READ},
    Kind.TOKEN: {Kind.TOKEN: _READ, Kind.PREFIX: _READ},
    Kind.PREFIX: {Kind.PREFIX: _READ},
    Kind.BYTES: {
        Kind.BYTES: {Link.SLOT, Link.PAGE, Link.REQUEST, Link.CONTENT},
        Kind.NON_FINITE: {Link.SLOT, Link.STEP},
    },
    Kind.NON_FINITE: {Kind.NON_FINITE: {Link.STEP, Link.REQUEST, *_OWNERS}},
}
"""Cause → kind that may follow → what links them. Every kind is a row."""

ORDER: dict[Kind, int] = {kind: place for place, kind in enumerate(CONSEQUENCES)}
"""Of two findings of one forward, the one with the lower number is the cause."""


def links(one: Kind, other: Kind) -> frozenset[Link]:
    """What may link two findings of these kinds, whichever of them is the cause: findings of one read come in no
    causal order."""
    return _LINKS[one, other]


_LINKS = {
    (one, other): frozenset(CONSEQUENCES[one].get(other, set()) | CONSEQUENCES[other].get(one, set()))
    for one in Kind
    for other in Kind
}
