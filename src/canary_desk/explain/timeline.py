"""The timeline of the root's slot: the device's notes, the host's calls, the record and the findings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from canary_core.incident import Incident
from canary_core.kinds.facts import NAMELESS
from canary_core.ops.histories import Happening
from canary_core.records import (
    FREED_BY,
    HISTORY,
    POSITION,
    STATES,
    STEP_FREED,
    STEP_WRITTEN,
    WRITER,
    Kind,
    Phase,
    State,
)
from canary_core.runtime.journal import Entry
from canary_core.wording import numbered
from canary_desk.incidents.evidence import Evidence

_TOLD = {
    "alloc": "handed out",
    "free": "freed",
    "park": "let go of, kept by the prefix cache",
    "share": "given to a request by a prefix hit",
    "evict": "evicted from the prefix cache",
    "copy": "copied",
    "clear": "cleared",
    "forget": "bytes arrived without records",
    "import_records": "bytes arrived with their records",
    "expect": "bytes are about to arrive",
    "check": "compared on demand",
}
"""Calls, by name."""

_NOTED = {
    "alloc": "handed out{to}",
    "share": "given{to} by a prefix hit",
    "park": "let go of{by}, kept by the prefix cache",
    "evict": "evicted from the prefix cache",
    "free": "freed{by}",
    "write": "written{by}",
    "copy": "copied here from slot {who}",
    "arrive": "bytes arrived from elsewhere{by}",
    "forget": "bytes arrived without records",
    "clear": "cleared",
}
"""Events noted by the device, by name."""

_NOTED_AS = {"import_records": "arrive"}
"""Calls with another name in the device's notes."""

_BY_PHASE = {
    Phase.PRE_FORWARD: ", about to be read by {who}",
    Phase.POST_FORWARD: ", in the forward in which {who} writes it",
    Phase.SCRUB: ", by the scrub, in a slot of {who}",
    Phase.SWEEP: ", by a sweep of the prefix cache, in a slot of {who}",
    Phase.EVENT: ", on an event of {who}",
}
"""Findings about a request, by phase."""

_SEEN = {Phase.SCRUB: ", by the scrub", Phase.SWEEP: ", by a sweep of the prefix cache"}
"""Findings about no request."""

_RELEASES = ("free", "park", "evict")

_FOUND_BEFORE, _BEFORE, _WRITTEN, _FOUND_AFTER, _AFTER, _FOUND_THEN = range(6)
"""The order within one step: the check, the forward, findings after it, events before the next forward. The device
knows the order of its own notes better: an event may also come while the forward is in flight."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One line of a slot's timeline. ``sort``: event, write, free or finding. ``last``: the last step of ``times``
    equal lines, ``step`` the first."""

    step: int
    sort: str
    text: str
    last: int = 0
    times: int = 1

    @property
    def when(self) -> str:
        """The step, or the steps."""
        return f"step {self.step}" if self.times == 1 else f"steps {self.step} to {self.last}"


@dataclass(frozen=True, slots=True)
class _Line:
    """A moment and its place within the step."""

    place: int
    moment: Moment

    @property
    def order(self) -> tuple[int, int]:
        return self.moment.step, self.place


def timeline(incident: Incident, evidence: Evidence | None) -> Iterator[Moment]:
    """Moments of the root's slot, in order. The device's notes are sure. A call of the host is listed if it is older,
    or not among the device's events."""
    slot, region = incident.root.slot, incident.root.region
    if slot is None:
        return
    lines: list[_Line] = []
    if evidence is not None and evidence.region == region:
        noted = evidence.lives.get(slot, [])
        calls = [entry for entry in evidence.history if _is_about(entry, slot)]
        # Of one step the calls come first: those that the device has noted, too, are not among them.
        lines += (_call(entry, slot, evidence.names) for entry in calls if _is_news(entry, slot, noted))
        lines += _noted(slot, calls, evidence)
        lines += _recorded(slot, noted, evidence)
    lines += _found(incident, slot)
    moments = [line.moment for line in sorted(lines, key=lambda line: line.order)]
    for _, equal in groupby(moments, lambda m: (m.sort, m.text)):
        first, *more = equal
        yield replace(first, last=more[-1].step, times=1 + len(more)) if more else first


def _is_about(entry: Entry, slot: int) -> bool:
    """Whether a call is about ``slot``. Unknown, and False, for a call without kept slots."""
    if entry.slots is None:
        return not entry.count
    listed = slot // entry.page_slots in entry.slots.tolist()
    return listed or (entry.other is not None and slot in entry.other.tolist())


def _is_news(entry: Entry, slot: int, noted: list[Happening]) -> bool:
    """Whether a call says more than the device's notes ``noted``: an event the device does not note, or older than its
    oldest note. Where the device knows, an engine's own list, possibly changed since, says nothing."""
    event = _NOTED_AS.get(entry.event, entry.event)
    if event not in _NOTED or (event == "copy" and not _is_destination(entry, slot)):
        return True
    if any(h.event == event and h.step == entry.step for h in noted):
        return False
    own = [h for h in noted if not h.every]
    if not own:
        return True
    if entry.sure:
        # What is done again and again is noted once.
        return entry.step <= own[0].step or not any(h.event == event for h in own)
    return entry.step < own[0].step and len(own) == HISTORY


def _is_destination(entry: Entry, slot: int) -> bool:
    return entry.other is not None and slot in entry.other.tolist()


def _noted(slot: int, calls: list[Entry], evidence: Evidence) -> list[_Line]:
    """A line for each of the device's notes about ``slot``, in order."""
    noted = evidence.lives.get(slot, [])
    places = [_WRITTEN if h.event == "write" else _AFTER for h in noted]
    for i, (one, next_one) in reversed(list(enumerate(pairwise(noted)))):
        if one.step == next_one.step and places[i] > places[i + 1]:
            places[i] = _BEFORE
    record = evidence.record(slot)
    return [_Line(place, _moment(h, calls, evidence, record)) for place, h in zip(places, noted, strict=True)]


def _moment(noted: Happening, calls: list[Entry], evidence: Evidence, record: list[int] | None) -> Moment:
    name = evidence.names.get(noted.who) or ("a request" if noted.event == "share" else "")
    to, by = (f" to {name}", f" by {name}") if name else ("", "")
    text = _NOTED[noted.event].format(to=to, by=by, who=noted.who)
    same = [e for e in calls if _NOTED_AS.get(e.event, e.event) == noted.event and e.step == noted.step]
    if noted.every:
        text += " (all slots)"
    elif same and same[-1].slots is not None and same[-1].count > 1:
        text += _among(same[-1])
    elif noted.event == "write" and record is not None and record[STEP_WRITTEN] == noted.step:
        text += f" as position {record[POSITION] // STATES}"
    sort = "write" if noted.event == "write" else "free" if noted.event in _RELEASES else "event"
    return Moment(noted.step, sort, text)


def _among(entry: Entry) -> str:
    """How many others the call was about."""
    return f", with {numbered(entry.count - 1, 'other')}"


def _call(entry: Entry, slot: int, names: Mapping[int, str]) -> _Line:
    by = f", {names[entry.writer]}" if entry.writer in names else ""
    among = _among(entry) if entry.slots is not None and entry.count > 1 else ""
    every = " (all slots)" if entry.slots is None else ""
    doubt = "" if entry.sure else " (by the engine's own list, which may have changed since)"
    told = _TOLD.get(entry.event, entry.event)
    if entry.event == "copy" and entry.other is not None:
        told = "copied here" if _is_destination(entry, slot) else "copied to another slot"
    return _Line(_AFTER, Moment(entry.step, "event", f"{told}{by}{among}{every}{doubt}"))


def _recorded(slot: int, noted: list[Happening], evidence: Evidence) -> Iterator[_Line]:
    """Facts of the slot's record missing in ``noted``."""
    record = evidence.record(slot)
    if record is None:
        return
    if record[STEP_WRITTEN] and not any(h.event == "write" and h.step == record[STEP_WRITTEN] for h in noted):
        who = evidence.names.get(record[WRITER], NAMELESS)
        where = " in another slot" if record[POSITION] & State.ARRIVED else ""
        text = f"written{where} by {who} as position {record[POSITION] // STATES}"
        yield _Line(_WRITTEN, Moment(record[STEP_WRITTEN], "write", text))
    released = any(h.event in _RELEASES and h.step == record[STEP_FREED] for h in noted)
    if record[STEP_FREED] and not released:
        who = evidence.names.get(record[FREED_BY], "the engine")
        yield _Line(_AFTER, Moment(record[STEP_FREED], "free", f"let go of by {who}"))


def _found(incident: Incident, slot: int) -> Iterator[_Line]:
    places = {Phase.PRE_FORWARD: _FOUND_BEFORE, Phase.EVENT: _FOUND_THEN}
    found = [v for v in incident.findings if v.slot == slot and v.region == incident.root.region]
    for (step, kind), same in groupby(sorted(found, key=lambda v: (v.step, v.kind)), lambda v: (v.step, v.kind)):
        these = list(same)
        sources = sorted({v.source for v in these if v.source})
        what = f" in {', '.join(sources[:4])}{' ...' if len(sources) > 4 else ''}" if sources else ""
        how = (
            _BY_PHASE[these[0].phase].format(who=these[0].request)
            if these[0].request
            else _SEEN.get(these[0].phase, "")
        )
        if kind is Kind.ARRIVAL:
            how = f", brought for {these[0].request}" if these[0].request else ""
        moment = Moment(step, "finding", f"found: {kind.name.lower()}{what}{how}")
        yield _Line(places.get(these[0].phase, _FOUND_AFTER), moment)
