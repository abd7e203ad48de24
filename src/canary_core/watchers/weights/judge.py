"""Damage to weights, told apart from updates; and the finding of each damage."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from canary_core.records import Kind, Phase
from canary_core.violation import Violation
from canary_core.watchers.weights.change import Change

REGION = "weights"
"""In findings, in the place of a region of slots."""

MOST_STRETCHES, SHARE = 4, 8
"""Several words changed in more parameters than that, or in more than an eighth of one's chunks: an update."""

QUIET_ROUNDS = 3
"""Rounds without a change after which a buffer counts as constant."""


def unsure(changes: Mapping[int, Change], rounds: int) -> list[int]:
    """Chunks possibly changed by an untold update. ``changes``: all changes of the weights, by chunk, found in one
    comparison. ``rounds``: number of rounds over the weights so far."""
    several = Counter(c.stretch for c in changes.values() if c.word is None and not c.stretch.buffer)
    shares = (number * SHARE > stretch.range.chunks for stretch, number in several.items())
    update = len(several) > MOST_STRETCHES or any(shares)
    return [chunk for chunk, change in changes.items() if not _certain(change, update, rounds)]


def _certain(change: Change, update: bool, rounds: int) -> bool:
    """Whether nobody can have wanted the change. ``update``: the other changes look like an update, where some words
    change alone in a chunk."""
    stretch = change.stretch
    if stretch.buffer:
        return change.certain and rounds - stretch.disturbed >= QUIET_ROUNDS
    return not update and (change.certain or change.word is None)


def violation(change: Change, step: int) -> Violation:
    """The finding."""
    name, where = change.stretch.name, f"bytes {change.begin} to {change.end - 1}"
    facts: dict[str, Any] = {"source": name, "found_value": change.found, "detail": where}
    if change.word is not None:
        number, indices, old, new = change.element()
        bit = "" if change.bit is None else f", bit {change.bit} of a 32-bit word"
        facts |= {"element": number, "old": old, "new": new, "detail": f"{list(indices)}{bit}"}
    return Violation(kind=Kind.WEIGHTS, region=REGION, phase=Phase.SCRUB, step=step, **facts)
