"""`Nonconforming`: what the suite says of a plugin, and of which part of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from canary_core.events import Event
from canary_core.records import Kind, Phase
from canary_core.violation import Violation

Culprit = Literal["PoolAdapter", "BatchAdapter", "PoolAdapter or BatchAdapter", "slot events", "hooks", "session"]
"""Where to look: the regions; the view of a forward; calls of `canary.slots`; patches of the engine and the order in
which they call `canary.step`; the author's own `EngineSession`."""

SHOWN = 3
"""Findings or problems that a message quotes."""


class Nonconforming(AssertionError):
    """The plugin is wrong, or says less than it should. ``part`` says which part of it."""

    def __init__(self, part: Culprit, what: str) -> None:
        super().__init__(f"{part}: {what}")
        self.part = part


_SUSPECTS: dict[Kind, tuple[Culprit, str]] = {
    Kind.SLOT_RANGE: ("BatchAdapter", "the table names slots that do not exist: page_size, rows or width of SlotTable"),
    Kind.NULL_SLOT: ("BatchAdapter", "live tokens at the null slot: null_slot, lengths or rows of padding"),
    Kind.UNWRITTEN: (
        "BatchAdapter",
        "slots are read that no view said are written: prefix_lens, table, page_size, or forwards without a view; or "
        "events that clear too much",
    ),
    Kind.FREED: ("slot events", "slots are read after free or evict was told: tell park and share around a prefix hit"),
    Kind.POSITION: ("BatchAdapter", "slots hold other positions than the table says: table, page_size or prefix_lens"),
    Kind.TOKEN: ("BatchAdapter", "tokens differ from the requests' own: token_ids, prefix_lens or expected_tokens"),
    Kind.PREFIX: ("BatchAdapter", "prefixes do not continue: prefix_lens, writers, or a fork whose copy is not told"),
    Kind.BYTES: (
        "PoolAdapter",
        "bytes change that no view said are written: strides, page_size, layers that share memory, or copies of the "
        "engine that are not told",
    ),
    Kind.LOST_WRITE: (
        "PoolAdapter",
        "written slots did not change: the sources point elsewhere (slot dimension, page, copy), or write_slots do",
    ),
    Kind.WRITE_INPUT: ("BatchAdapter", "token_ids or positions contradict expected_tokens"),
    Kind.WRITE_SLOT: ("BatchAdapter", "write_slots contradict the table"),
    Kind.TWO_WRITERS: ("BatchAdapter", "two tokens of a batch have one slot: write_slots, table or padded rows"),
    Kind.NON_FINITE: ("PoolAdapter", "written values are no finite numbers: dtype or strides of a source"),
    Kind.DOUBLE_FREE: (
        "slot events",
        "free, park or evict is told twice of a slot, free where park is meant, or share not at a prefix hit",
    ),
    Kind.DOUBLE_ALLOC: ("slot events", "alloc is told of slots in use, or their free or evict is not told"),
    Kind.WRITE_AFTER_FREE: ("slot events", "alloc is not told, or free is told too early"),
    Kind.EVICTED_IN_USE: ("slot events", "evict is told of slots that were never parked: tell park before, or free"),
    Kind.CACHE_STRUCTURE: ("hooks", "the prefix cache is read wrongly"),
}


def require_silence(
    violations: Sequence[Violation], events: Iterable[Event], doing: str, part: Culprit | None = None
) -> None:
    """Raises `Nonconforming` where anything was found, or told as an error, while the engine did nothing wrong, only
    what ``doing`` says. ``part``: what is to blame, where that is known; else the kind of the first finding says it."""
    errors = [event for event in events if event.level == "error" and not event.name.startswith("incident")]
    if errors:
        event = errors[0]
        told = {k: v for k, v in event.fields.items() if k != "traceback"}
        raise Nonconforming("hooks", f"{doing}: Canary told an error, {event.name}: {told}")
    if not violations:
        return
    kinds = Counter(v.kind for v in violations)
    # The first cause comes first: later findings are often its consequences.
    first = violations[0]
    suspect, hint = _SUSPECTS[first.kind]
    if first.phase is Phase.EVENT and suspect != "slot events":
        suspect, hint = "slot events", "an event names slots that are none: page_slots, region or numbers of pages"
    elif part not in (None, suspect):
        suspect, hint = "slot events", f"is what happens in {doing} told, with the right slots, where it happens?"
    counts = ", ".join(f"{n} {kind.name.lower()}" for kind, n in kinds.most_common())
    quoted = "; ".join(str(v) for v in violations[:SHOWN])
    raise Nonconforming(suspect, f"{doing}: findings on an engine that does nothing wrong ({counts}): {hint}. {quoted}")
