"""`Known`: findings that were decided on before, so that each is reported once."""

from collections import OrderedDict

from canary_core.records import Kind
from canary_core.violation import Violation

REMEMBERED = 65536
"""Findings remembered, by a hash."""


class Known:
    """Keys of findings, see `key_of`, and whether each was told or dismissed. ``repeated`` counts findings found
    again; ``forgotten`` those beyond `REMEMBERED`, which are reported again when they are."""

    def __init__(self) -> None:
        self._told: OrderedDict[int, bool] = OrderedDict()
        self.repeated = 0
        self.forgotten = 0

    def repeats(self, key: int) -> bool:
        """Whether the finding is known. A persistent fault is found by every check; a fault in a rewritten slot, or
        with other bytes, is new."""
        if key in self._told:
            self._told.move_to_end(key)
            self.repeated += 1
            return True
        return False

    def add(self, key: int) -> None:
        """A finding not told so far: dismissed, or withheld."""
        self._told[key] = False
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
            self.forgotten += 1

    def tell(self, key: int) -> None:
        """The finding is reported."""
        self._told[key] = True

    def forget(self, key: int) -> None:
        """The next such finding is a new one."""
        self._told.pop(key, None)

    def told(self, key: int) -> bool:
        """Whether the finding was reported."""
        return self._told.get(key, False)


def key_of(v: Violation) -> int:
    """A number for the finding, the same for a repeated one."""
    key: tuple[object, ...] = (v.kind, v.region, v.slot, v.source, v.step_written, v.found_value)
    if v.kind is Kind.CACHE_STRUCTURE:
        key = (*key, v.rule, v.node, v.detail)
    elif v.kind is Kind.READ_LENGTH:
        # Lengths grow with each forward; the mistake is the same.
        key = (v.kind, v.region, v.detail, v.request, (v.found_value or 0) - (v.stored_value or 0))
    elif v.kind is not Kind.BYTES:
        key = (*key, v.position, v.request)
    return hash(key)
