"""The ``coverage`` events of an engine's log, as ``canary coverage`` shows them."""

import json
from collections.abc import Iterable
from typing import Any


def coverage_events(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The last ``coverage`` event of each model in a log of ``CANARY_LOG_FORMAT=json``, in order of appearance. Lines
    of others are passed over; ours may have something before them (a rank, a pod's name)."""
    found: dict[object, dict[str, Any]] = {}
    for line in lines:
        if '"coverage"' not in line or "{" not in line:
            continue
        try:
            event = json.loads(line[line.index("{") :])
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == "coverage":
            found[event.get("model")] = event
    return list(found.values())
