"""`Nonconforming`: the suite's verdict on a plugin, with the part to blame."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from canary_core.events import Event
from canary_core.kinds import registry
from canary_core.records import Phase
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
        raise Nonconforming("hooks", f"{doing}: Canary told an error, {event.name}: {told}")
    if not violations:
        return
    kinds = Counter(v.kind for v in violations)
    # The first cause comes first: later findings are often its consequences.
    first = violations[0]
    suspect, hint = registry.of(first.kind).blame
    if first.phase is Phase.EVENT and suspect != "slot events":
        suspect, hint = "slot events", "an event names slots that are none: page_slots, region or numbers of pages"
    elif part not in (None, suspect):
        suspect, hint = "slot events", f"is what happens in {doing} told, with the right slots, where it happens?"
    counts = ", ".join(f"{n} {kind.name.lower()}" for kind, n in kinds.most_common())
    quoted = "; ".join(str(v) for v in violations[:SHOWN])
    raise Nonconforming(suspect, f"{doing}: findings on an engine that does nothing wrong ({counts}): {hint}. {quoted}")
