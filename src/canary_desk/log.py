"""Built-in reporting: findings and events as structlog events with fields, to stderr or to the host's structlog."""

import contextlib
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

import pluggy
import structlog

from canary_core.config import CanaryConfig, LogFormat, LogLevel
from canary_core.events import Event, all_escaped
from canary_core.plugins.hookspecs import hookimpl
from canary_core.violation import Violation

MOST_LINE_BYTES, ROOM_BYTES = 4096, 3600
"""Longest line, and most of it for an event's fields, as JSON; the rest is for time, level, name and colours."""


class Reporting:
    """A plugin like any other, registered first and called first, so that no other plugin can silence it.

    Where the host has configured structlog, events go through the host's pipeline, under the logger name ``canary``;
    else through a logger of ours to stderr. Neither structlog's nor logging's global setup is ever changed. Either way
    texts are escaped, so that nobody's name forges a line, and a line has at most `MOST_LINE_BYTES`.
    """

    def __init__(self) -> None:
        self._format: LogFormat = "console"
        self._level: LogLevel = "info"
        self._violations: LogLevel = "debug"

    @hookimpl(tryfirst=True)
    def canary_configure(self, config: CanaryConfig, manager: pluggy.PluginManager) -> None:
        """Takes format and levels over from ``config``."""
        self._format, self._level = config.log_format, config.log_level
        self._violations = config.violation_level

    @hookimpl(tryfirst=True)
    def canary_violation(self, violation: Violation) -> None:
        """Logs ``violation``, with `Violation.fields`, at the level of ``CANARY_VIOLATION_LEVEL``. Its incident is an
        event of its own."""
        # An avalanche that nobody will see costs nothing.
        if structlog.is_configured() or _number(self._violations) >= _number(self._level):
            self._log(Event("violation", self._violations, violation.fields()))

    @hookimpl(tryfirst=True)
    def canary_event(self, event: Event) -> None:
        """Logs ``event`` under its name and level, with its fields."""
        self._log(event)

    def _log(self, event: Event) -> None:
        """Never raises, as handlers of `logging` never do: a full disk, a closed pipe or a failing processor of the
        host must not end the engine. An event refused by the host's pipeline goes to stderr."""
        # Asked at each event: a host may configure structlog, or replace sys.stderr, after we were loaded.
        hosted = structlog.is_configured()
        try:
            self._write(event, hosted)
        except Exception:
            with contextlib.suppress(Exception):
                self._write(event, hosted=False)

    def _write(self, event: Event, hosted: bool) -> None:
        fields: Mapping[str, Any] = all_escaped(event.fields)
        if event.name in _PAGES and self._format == "console" and not hosted:
            getattr(self._logger(hosted), event.level)(_PAGES[event.name](fields))
            return
        fields = _bounded(fields)
        if self._format == "console" and not hosted:
            fields = {
                name: value for name, value in fields.items() if not _goes_without_saying(event.name, name, value)
            }
        bound = self._logger(hosted).bind(**{**fields, "logger": "canary"})
        getattr(bound, event.level)(event.name)

    def _logger(self, hosted: bool) -> structlog.typing.BindableLogger:
        if hosted:
            return structlog.get_logger("canary")  # type: ignore[no-any-return]  # structlog types it Any
        return structlog.wrap_logger(  # type: ignore[no-any-return]  # structlog types it Any
            # A line in one write: workers share stderr, and where it is not buffered (PYTHONUNBUFFERED) the ends of
            # lines would be mixed up.
            structlog.WriteLogger(sys.stderr),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.JSONRenderer(default=str)
                if self._format == "json"
                else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(_number(self._level)),
        )


def _goes_without_saying(event: str, name: str, value: object) -> bool:
    """Whether a field is left out of a line for people: the machine, but where a pool is attached and where something
    was found; the only replica's and the first rank's number."""
    if name in ("replica", "rank"):
        return not value
    return name in ("host", "gpu") and event not in ("attached", "incident")


def _number(level: LogLevel) -> int:
    return int(getattr(logging, level.upper()))


def _bounded(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """``fields`` within `ROOM_BYTES`: the largest ones are cut, and last ones left out, with a note of how much."""
    sizes = {name: len(name) + 4 + len(json.dumps(value)) for name, value in fields.items()}
    if sum(sizes.values()) <= ROOM_BYTES:
        return fields
    # The largest size at which all fit, as long as each is cut to no less than a number's length.
    left, room = len(sizes), float(ROOM_BYTES)
    for size in sorted(sizes.values()):
        if size * left > room:
            break
        left, room = left - 1, room - size
    most = max(int(room / max(left, 1)), LEAST_FIELD_BYTES)
    out: dict[str, Any] = {}
    spent = 0
    for name, value in fields.items():
        if sizes[name] > most:
            value = _cut(value, most - len(name) - 4)
        spent += len(name) + 4 + len(json.dumps(value))
        if spent > ROOM_BYTES:
            return {**out, "left_out": len(fields) - len(out)}
        out[name] = value
    return out


LEAST_FIELD_BYTES = 80
"""A field is not cut to less."""


def _cut(value: Any, most_bytes: int) -> str:
    """Start and end of a field's text, with a note between them, in so many bytes as JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    note = f" ... ({len(text)} characters) ... "
    each = most_bytes // 2
    while True:
        told = text[:each] + note + text[len(text) - each :]
        if each == 0 or len(json.dumps(told)) <= most_bytes:
            return told
        each = each * 7 // 8


def _page(fields: Mapping[str, Any]) -> str:
    """A ``summary`` event for people: a line for each region and for each warning."""
    about = "".join(f", {name} {fields[name]}" for name in ("model", "replica", "rank") if fields.get(name))
    lines = [f"canary summary{about}: {fields['summary']}"]
    for region, kinds in fields["events"].items():
        told = ", ".join(f"{kind} {number}" for kind, number in kinds.items())
        lines.append(f"  events of {region}: {told or 'none'}")
    lines += [f"  warning: {sentence}" for sentence in fields["warnings"]]
    return "\n".join(line[:ROOM_BYTES] for line in lines)


def _verdict(fields: Mapping[str, Any]) -> str:
    """A ``diagnosis`` event for people, in two lines: verdict and place; reason, next action, command for the rest."""
    test = "SELF-TEST, " if fields.get("self_test") else ""
    named = ("model", "host", "gpu", "replica", "rank")
    place = ", ".join(f"{name} {fields[name]}" for name in named if name in fields)
    said = [f"{sentence.removesuffix('.')}." for sentence in (*fields["evidence"][:1], *fields["next_steps"][:1])]
    more = [f"More: canary explain {fields['bundle']}"] if fields.get("bundle") else []
    first = f"canary: {test}{fields['sentence']} Incident {fields['incident']}, {place} ({fields.get('signature')})"
    return "\n".join(line[:ROOM_BYTES] for line in (first, f"  {' '.join([*said, *more])}"))


_PAGES = {"summary": _page, "diagnosis": _verdict}
"""Events with a form of their own for people."""
