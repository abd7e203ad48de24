"""The history of slots in a bundle: calls seen by the host, and the device's notes on each slot."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from canary_core.ops.histories import Happening
from canary_core.records import Happened
from canary_core.runtime.journal import Entry

MOST_CALL_SLOTS = 64
"""Most slots of one call in the history; more are counted."""

_EVENTS = frozenset(what.name.lower() for what in Happened)


def call_fields(entry: Entry, names: Mapping[int, str]) -> dict[str, object]:
    """A call as plain values. ``names``: requests by writer id."""
    slots = None if entry.slots is None else entry.slots[:MOST_CALL_SLOTS].tolist()
    other = None if entry.other is None else entry.other[:MOST_CALL_SLOTS].tolist()
    out = {
        "step": entry.step,
        "event": entry.event,
        "count": entry.count,
        "page_slots": entry.page_slots,
        "writer": names.get(entry.writer),
        "slots": slots,
        "to": other,
        "sure": entry.sure,
    }
    return {name: value for name, value in out.items() if value is not None}


def call_of(fields: Mapping[str, Any], region: str, writers: Mapping[str, int]) -> Entry:
    """A call of ``region`` from `call_fields`. ``writers``: writer ids by request."""
    return Entry(
        fields["step"],
        fields["event"],
        region,
        fields["count"],
        writers.get(fields.get("writer", ""), -1),
        torch.tensor(fields["slots"], device="cpu") if fields.get("slots") is not None else None,
        fields["page_slots"],
        torch.tensor(fields["to"], device="cpu") if fields.get("to") is not None else None,
        fields["sure"],
    )


def life_rows(life: Sequence[Happening]) -> list[list[object]]:
    """Events of a slot, oldest first: step, event, who, and true for an event of all slots."""
    return [[h.step, h.event, h.who, *([True] if h.every else [])] for h in life]


def life_of(rows: Sequence[Sequence[Any]]) -> list[Happening]:
    """From `life_rows`. Raises ValueError, TypeError or IndexError for anything else."""
    for row in rows:
        if row[1] not in _EVENTS:
            raise ValueError(f"no event {row[1]!r}")
    return [Happening(int(row[0]), row[1], int(row[2]), len(row) > 3 and bool(row[3])) for row in rows]
