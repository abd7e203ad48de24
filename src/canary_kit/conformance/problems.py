"""`Nonconforming`: the suite's verdict on a plugin, with the part to blame."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from canary_core.events import Event
from canary_core.kinds import registry
from canary_core.records import Kind, Phase
from canary_core.violation import Violation

Culprit = Literal["PoolAdapter", "BatchAdapter", "PoolAdapter or BatchAdapter", "slot events", "hooks", "session"]
"""Part to look at: the regions; the view of a forward; calls of `canary.slots`; patches of the engine and the order of
their calls of `canary.step`; the author's own `EngineSession`."""

SHOWN = 3
"""Findings or problems quoted in a message."""


class Nonconforming(AssertionError):
    """The plugin is wrong, or says less than it should. ``part``: the part to blame."""

    def __init__(self, part: Culprit, what: str) -> None:
        super().__init__(f"{part}: {what}")
        self.part = part


def blamed_for_error(event: Event) -> Culprit:
    """The part to blame for an ``event`` that tells an error of Canary's own, or a call in a wrong way."""
    told = " ".join(str(value) for value in event.fields.values())
    if event.name == "wrong_memory":
        return "PoolAdapter or BatchAdapter"
    if "SlotEvents." in told or (event.name == "misuse" and "slots." in told.partition(":")[0]):
        return "slot events"
    return "hooks"


def require_silence(
    violations: Sequence[Violation], events: Iterable[Event], doing: str, part: Culprit | None = None
) -> None:
    """Raises `Nonconforming` for any finding or reported error, while the engine did nothing wrong, only ``doing``.
    ``part``: the part to blame, where known; by default derived from the kind of the first finding."""
    errors = [
        event for event in events if event.level == "error" and not event.name.startswith(("incident", "diagnosis"))
    ]
    if errors:
        event = errors[0]
        told = {k: v for k, v in event.fields.items() if k != "traceback"}
        raise Nonconforming(blamed_for_error(event), f"{doing}: Canary told an error, {event.name}: {told}")
    if not violations:
        return
    kinds = Counter(v.kind for v in violations)
    suspect, hint = _blamed(violations, doing, part)
    counts = ", ".join(f"{n} {kind.name.lower()}" for kind, n in kinds.most_common())
    quoted = "; ".join(str(v) for v in violations[:SHOWN])
    raise Nonconforming(suspect, f"{doing}: findings on an engine that does nothing wrong ({counts}): {hint}. {quoted}")


def _blamed(violations: Sequence[Violation], doing: str, part: Culprit | None) -> tuple[Culprit, str]:
    """The part to blame, and where to look in it."""
    # The first cause comes first: later findings are often its consequences.
    first = violations[0]
    of_events = [v.phase is Phase.EVENT for v in violations if v.kind is Kind.NULL_SLOT]
    if first.kind is Kind.NULL_SLOT and len(set(of_events)) > 1:
        return "PoolAdapter", "events and views agree that padding is live: Region.null_slot or null_slots"
    if first.kind is Kind.PREFIX and first.identity:
        return (
            "hooks",
            "identities where there are none: canary.writers.identify, or the order of BatchView.anchors",
        )
    suspect, hint = registry.of(first.kind).blame
    if first.phase is Phase.EVENT and suspect != "slot events":
        return "slot events", "an event names slots that are none: page_slots, region or numbers of pages"
    if part not in (None, suspect):
        return "slot events", f"is what happens in {doing} told, with the right slots, where it happens?"
    return suspect, hint
