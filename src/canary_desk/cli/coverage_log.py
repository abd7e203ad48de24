"""An engine's log as read by ``canary coverage``: the ``coverage`` events, or why there are none."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]

COVERAGE_FIELDS = {"summary", "guarded_bytes", "uncovered"}
TEXT_EVENT = re.compile(r"\[(?:\x1b\[[\d;]*m)*canary(?:\x1b\[[\d;]*m)*\]")
"""How an event of ours looks in a log of ``CANARY_LOG_FORMAT=console``."""


@dataclass(slots=True)
class CoverageLog:
    """Events in a log of ``CANARY_LOG_FORMAT=json``. Lines of others are passed over; Canary's may have a prefix (a
    rank, a pod's name)."""

    coverage: dict[object, Fields] = field(default_factory=dict)
    """The last ``coverage`` event of each model, in order of appearance."""
    disabled: dict[object, Fields] = field(default_factory=dict)
    """By model and rank, guards switched off for good."""
    others: dict[str, Fields] = field(default_factory=dict)
    """The last event of each other name."""
    as_text: bool = False
    """Whether the log has events of Canary in the format for people."""

    @classmethod
    def read(cls, lines: Iterable[str]) -> "CoverageLog":
        """From the lines of a log, of whatever program."""
        log = cls()
        for line in lines:
            log._add(_event(line))
            log.as_text = log.as_text or TEXT_EVENT.search(line) is not None
        return log

    def _add(self, event: Fields) -> None:
        model, name = event.get("model"), event.get("event")
        part = (model, event.get("replica"), event.get("rank"), event.get("host"))
        if name == "coverage" and event.keys() >= COVERAGE_FIELDS:
            self.coverage[model] = event
            self.disabled.pop(part, None)
        elif event.get("logger") != "canary":
            pass
        elif name == "disabled":
            self.disabled[part] = event
        else:
            self.others[str(name)] = event

    @property
    def problem(self) -> str | None:
        """Why nothing is guarded, or why the answer is unknown, in a sentence; None if all is well."""
        if self.disabled:
            return "; ".join(_disabled(event) for event in self.disabled.values())
        if self.coverage:
            return None
        if "start_failed" in self.others:
            return f"Canary did not start, so nothing is guarded: {self.others['start_failed'].get('error')}"
        failed = {**self._field("plugins_loaded", "failed"), **self._field("plugins_installed", "failed")}
        if failed:
            return f"a plugin failed, so nothing is guarded: {'; '.join(map(str, failed.values()))}"
        if "plugins_loaded" in self.others and "plugins_installed" not in self.others:
            return "Canary was off (CANARY_MODE=off), so nothing is guarded; start the engine with CANARY_MODE=log"
        if self.others:
            return (
                "it has events of Canary, but no coverage event; give the log from the engine's start on, written with "
                "CANARY_LOG_LEVEL=info"
            )
        if self.as_text:
            return (
                "its events of Canary are text, which can't be read back; start the engine with CANARY_LOG_FORMAT=json"
            )
        return (
            "it has no event of Canary, so it is no log of a guarded engine; start the engine with CANARY_PLUGINS and "
            "CANARY_LOG_FORMAT=json"
        )

    def _field(self, event: str, name: str) -> Fields:
        found = self.others.get(event, {}).get(name)
        return found if isinstance(found, dict) else {}


def _event(line: str) -> Fields:
    """The event in a line; empty without one."""
    start = line.find("{")
    if start < 0 or '"event"' not in line:
        return {}
    try:
        event = json.loads(line[start:])
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _disabled(event: Fields) -> str:
    about = "".join(f" of {name} {event[name]}" for name in ("model", "replica", "rank") if event.get(name))
    where, error = event.get("where"), event.get("error")
    return f"Canary{about} was disabled, so nothing is guarded since then: {error} (in {where})"
