"""Whose answers an incident concerns, the times of steps by the clock, and the next actions at night."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from canary_core.incident import Incident
from canary_core.kinds import registry
from canary_core.kinds.facts import named
from canary_core.kinds.finding_kind import Wrong
from canary_core.records import Kind, Phase
from canary_core.wording import listed
from canary_desk.incidents.bundle import Bundle

SELF_TEST = "self-test: a fault was injected on purpose, the engine is not to blame"
"""Mark of an incident in an engine with faults of Canary's own."""

CLOSE_S = 2.0
"""Distance of two known times that count as one."""

MOST_NAMED = 8
"""Requests named in a sentence."""

_BOOKS = (Wrong.ALLOCATOR, Wrong.CACHE)
"""Sorts of kinds where books are wrong, and no KV yet."""

_CONTENT = (Wrong.BYTES, Wrong.WRITE, Wrong.ARRIVAL)
"""Sorts of kinds where the slot's owner has wrong KV, too."""

_UNREAD = ("not known to be wrong: no damaged KV was read", False)
_UNHARMED = ("not known to be wrong: its own KV was as written while the request had the slot", False)


@dataclass(frozen=True, slots=True)
class Affected:
    """One request: its ``part`` in the incident, and the fate of its ``answer``. ``retract``: the answer was, or may
    have been, computed from damaged KV, and leaves the engine. ``trace``: the id of its trace, empty where unknown."""

    request: str
    part: str
    answer: str
    retract: bool
    trace: str = ""


@dataclass(slots=True)
class StepTimes:
    """Times of steps, by the events of a bundle with a number of forwards and a time. ``known``: numbers of forwards
    and seconds since the epoch, of a moment at which so many had begun."""

    known: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, bundle: Bundle) -> "StepTimes":
        """By the events before the incident, and its own time."""
        known = []
        for event in bundle.events:
            number = 0 if event.get("event") == "attached" else event.get("forwards")
            if isinstance(number, int) and isinstance(event.get("time"), (int, float)):
                known.append((number, float(event["time"])))
        told = bundle.about.get("told")
        if isinstance(told, (int, float)):
            known.append((int(bundle.about.get("forwards", bundle.incident["last_step"])), float(told)))
        return cls(sorted(known))

    def at(self, step: int) -> str:
        """The time of a step in UTC: one, or the two between which it was; empty where unknown."""
        after = max((when for number, when in self.known if number < step), default=None)
        before = min((when for number, when in self.known if number >= step), default=None)
        if before is None:
            return ""
        if after is None or after > before:
            return f"before {_time(before)}"
        return _time(before) if before - after <= CLOSE_S else f"{_time(after)} to {_time(before)}"


def self_test(bundle: Bundle) -> str:
    """Text of the mark where faults were injected on purpose, or are to be; else empty."""
    injected = [e for e in bundle.events if e.get("event") == "fault_injected"]
    if injected:
        return f"{SELF_TEST} ({injected[-1].get('fault')} at step {injected[-1].get('step')})"
    asked = bundle.about.get("settings", {}).get("CANARY_FAULTS")
    return f"{SELF_TEST} (CANARY_FAULTS={asked})" if asked else ""


def affected(bundle: Bundle) -> list[Affected]:
    """The requests of an incident, readers first, as far as the bundle tells."""
    incident = bundle.rebuilt()
    wrong, fate = registry.of(incident.root.kind).page.wrong, _Fate.of(bundle)
    read = {**_parts(incident), **_hits(bundle, incident)}
    rows = [
        Affected(name, part, *(_UNREAD if wrong in _BOOKS else fate.of_reader(name))) for name, part in read.items()
    ]
    others: dict[str, Affected] = {}
    for v in incident.findings:
        name = v.stored_request
        if name is None or name in read:
            continue
        part = "wrote the slot" + (f" at step {v.step_written}" if v.step_written else "")
        answer = _UNHARMED if v.step_freed or wrong not in _CONTENT else fate.of_owner(name)
        if name not in others or answer[1] > others[name].retract:
            others[name] = Affected(name, part, *answer)
    rest = (name for name in incident.requests if name not in read and name not in others)
    every = [*rows, *others.values(), *(Affected(name, "is named by a finding", *_UNREAD) for name in rest)]
    known = bundle.incident.get("traces")
    traces = known if isinstance(known, dict) else {}
    return [replace(row, trace=str(traces.get(row.request, ""))) for row in every]


def summary(rows: Sequence[Affected], complete: bool) -> str:
    """A sentence on the answers. ``complete``: every finding was kept in the bundle."""
    if not rows:
        return "no request is named by the findings"
    out = [row.request for row in rows if row.retract]
    more = "" if complete else "; there are more findings than the bundle keeps, so there may be more requests"
    if not out:
        return f"no answer with damage in it is known to have left the engine{more}"
    answers, were = ("the answer of", "was") if len(out) == 1 else (f"{len(out)} answers, those of", "were")
    return f"{answers} {_listed(out)} may be wrong and {were} not held back: retract, or compute again{more}"


def to_do(bundle: Bundle, rows: Sequence[Affected]) -> list[str]:
    """The next actions, most urgent first."""
    if self_test(bundle):
        return ["Nothing, if the self-test was meant; else unset CANARY_FAULTS and restart the engine."]
    about, root = bundle.about, bundle.rebuilt().root
    out = [row.request for row in rows if row.retract]
    steps = [f"Retract the answers of {_listed(out)}, or compute them again on another replica."] if out else []
    where = f"replica {about.get('replica', 0)}" + (f" on {about['host']}" if about.get("host") else "")
    steps.append(f"Take {where} out of the traffic until the cause is known; keep this bundle.")
    for remedy in registry.of(root.kind).page.remedies:
        steps.append(f"If it is {remedy.usually}{remedy.when}: {remedy.do.replace('`', '')}.")
    return [*steps, *bundle.diagnoses[0].next_steps]


@dataclass(frozen=True, slots=True)
class _Fate:
    """The fate of answers after the finding. ``raises``: the engine was stopped. ``ended``: requests that were
    aborted because of a finding."""

    raises: bool
    ended: frozenset[str]

    @classmethod
    def of(cls, bundle: Bundle) -> "_Fate":
        events: list[Mapping[str, Any]] = [*bundle.events, *bundle.after.get("events", [])]
        changed = [e.get("mode") for e in bundle.events if e.get("event") == "mode_changed"]
        mode = changed[-1] if changed else bundle.about.get("settings", {}).get("CANARY_MODE")
        return cls(mode == "raise", frozenset(str(e.get("request")) for e in events if e.get("event") == "aborted"))

    def of_reader(self, name: str) -> tuple[str, bool]:
        if name in self.ended:
            return "ended with an error; tokens that were streamed before have left the engine", True
        if self.raises:
            return "held back from this step on, since the engine was stopped; earlier tokens have left it", False
        return "leaves the engine: nothing holds it back", True

    def of_owner(self, name: str) -> tuple[str, bool]:
        if self.raises or name in self.ended:
            return self.of_reader(name)
        return "wrong if the request read the slot after the damage; nothing holds it back", True


def _parts(incident: Incident) -> dict[str, str]:
    """Requests that read damage, or whose own KV was not stored, with their part."""
    parts: dict[str, str] = {}
    for v in sorted(incident.findings, key=lambda v: v.step):
        if v.request is None:
            continue
        if v.kind is Kind.ARRIVAL:
            parts.setdefault(v.request, f"was given the bytes at step {v.step}")
        elif v.phase is Phase.POST_FORWARD:
            parts.setdefault(v.request, f"wrote at step {v.step}, and reads it in every step after")
        elif v.phase is Phase.PRE_FORWARD:
            parts.setdefault(v.request, f"read it at step {v.step}")
    return parts


def _hits(bundle: Bundle, incident: Incident) -> dict[str, str]:
    """Requests that were given the root's slot by a prefix hit after it was written, with their part."""
    root, evidence = incident.root, bundle.evidence
    if evidence is None or root.slot is None:
        return {}
    shared = [h for h in evidence.lives.get(root.slot, []) if h.event == "share" and h.step >= (root.step_written or 0)]
    named = {evidence.names[h.who]: h.step for h in shared if h.who in evidence.names}
    return {name: f"was given the slot by a prefix hit at step {step}" for name, step in named.items()}


def _listed(names: Sequence[str]) -> str:
    return listed([str(named(name)) for name in names], MOST_NAMED)


def _time(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def folded(lines: Sequence[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Lines, equal neighbours as one with their number."""
    for place, line in enumerate(lines):
        if place and lines[place - 1] == line:
            continue
        count = next((n for n, other in enumerate(lines[place:]) if other != line), len(lines) - place)
        yield line if count == 1 else (*line[:2], f"{line[2]} ({count} times)")
