"""`Incidents`: puts each finding into its incident, and reports each incident once."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from canary_core.events import Event
from canary_core.incident import MOST_KEPT, Incident
from canary_core.kinds import registry
from canary_core.kinds.facts import ABSORBED
from canary_core.kinds.links import NEAR_STEPS, Link
from canary_core.records import Kind, Phase
from canary_core.runtime.telling import Untold
from canary_core.violation import Violation
from canary_core.wording import by_name

MOST_OPEN = 256
"""Most open incidents; beyond, the one quiet for longest is closed."""

MOST_KEYS = 16384
"""Most keys that link a finding to the open incidents, all together; beyond, the one unused for longest goes."""

LIMIT_S = 60.0
"""Seconds over which ``CANARY_INCIDENT_LIMIT`` counts."""

Key = tuple[Link, object, object]


class Incidents:
    """The incidents of one Canary. `add` takes findings as they are reported; `tell`, after each read of the ring,
    reports the new incidents.

    All work is the host's, and there is none without a finding. ``limit``: incidents reported within `LIMIT_S`, 0 for
    all; further ones are ``limited``: counted, and reported as one ``incidents_limited`` event. Each reported incident
    goes to ``tell_incident`` after its event. ``total`` counts all incidents.
    """

    def __init__(self, tell: Callable[[Event], None], limit: int, tell_incident: Callable[[Incident], None]) -> None:
        registry.load()
        self._tell_event = tell
        self._limit = limit
        self._tell_incident = tell_incident
        self._open: OrderedDict[Incident, dict[Key, None]] = OrderedDict()
        self._index: OrderedDict[Key, list[Incident]] = OrderedDict()
        self._links = 0
        self._new: list[Incident] = []
        self._times: list[float] = []
        self.limited = Untold(tell, Event("incidents_limited", "error", {"limit": limit}), "incidents")
        self._grown: dict[Incident, int] = {}
        self.total = 0
        self.counts: dict[tuple[Kind, str], int] = {}
        self.last: Incident | None = None

    def __iter__(self) -> Iterator[Incident]:
        """Open incidents, the oldest first."""
        return iter(sorted(self._open, key=lambda incident: incident.number or self.total + 1))

    def add(self, violation: Violation) -> Incident:
        """The incident of ``violation``: an open one with its cause, or a new one."""
        keys = list(_keys(violation))
        damage = self._damage_read(violation) if violation.kind is Kind.LOST_WRITE else None
        found = [damage] if damage else self._related(violation, [*keys, *_beside(violation)])
        told = [incident for incident in found if incident.told]
        if not found:
            incident = Incident(violation)
            self._new.append(incident)
            self._open[incident] = {}
        else:
            incident = min(told, key=lambda incident: incident.number) if told else found[0]
            for other in found:
                if other is not incident and not other.told:
                    self._absorb(incident, other)
        incident.add(violation, leads=damage is None)
        if damage is None:
            self._enter(incident, keys)
        self._open.move_to_end(incident)
        while len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))
        if incident.told:
            self._grown[incident] = self._grown.get(incident, 0) + 1
        self.last = incident
        return incident

    def read_again(self, violation: Violation) -> None:
        """A repeated finding of changed bytes names one more request, as their reader."""
        if violation.kind is Kind.BYTES and violation.request is not None:
            for incident in self._index.get((Link.SLOT, violation.region, violation.slot), ()):
                if Kind.BYTES in incident.kinds and len(incident.requests) < MOST_KEPT:
                    incident.requests[violation.request] = None

    def _damage_read(self, violation: Violation) -> Incident | None:
        """The first open incident whose damage explains a write without a trace: the request has read changed bytes, or
        wrote NaN over NaN after some damage. Damage may make one number of all numbers."""
        found = [
            incident
            for incident in self._open
            if incident.root.step <= violation.step
            and (
                (Kind.BYTES in incident.kinds and violation.request in incident.requests)
                or (violation.detail == ABSORBED and not incident.kinds.keys().isdisjoint(_DAMAGE))
            )
        ]
        return min(found, key=lambda incident: (not incident.told, incident.number), default=None)

    def tell(self) -> list[Incident]:
        """After all findings of a read: reports the new incidents by an event each, and returns them. Reported ones
        that grew are an ``incident_grew`` event at level debug."""
        if not (self._new or self._grown or self.limited.waiting):
            return []
        new, self._new = self._new, []
        for incident, findings in self._grown.items():
            about = {"incident": incident.number, "new_findings": findings, "findings": incident.total}
            self._tell_event(Event("incident_grew", "debug", {**about, "kinds": by_name(incident.kinds)}))
        self._grown = {}
        now = time.monotonic()
        self._times = [moment for moment in self._times if now - moment < LIMIT_S]
        if len(self._times) < self._limit:
            self.limited.look(now)
        for incident in new:
            self.total += 1
            place = (incident.root.kind, incident.root.region)
            self.counts[place] = self.counts.get(place, 0) + 1
            incident.number, incident.told = self.total, True
            if self._limit and len(self._times) >= self._limit:
                self.limited.add(by_name(incident.kinds), at=incident.number)
                continue
            self._times.append(now)
            # The event first: whoever looks at the incident, on a thread of its own, has something to tell soon.
            self._tell_event(Event("incident", "error", incident.fields()))
            self._tell_incident(incident)
        return new

    def _related(self, violation: Violation, keys: Iterable[Key]) -> list[Incident]:
        found: dict[Incident, None] = {}
        for key in keys:
            if key[0] is Link.CONTENT and key[1] == ("stored", violation.stored_value):
                continue  # Two that should have the same have nothing to do with each other.
            for incident in self._index.get(key, ()):
                if incident not in found and _follows(key[0], violation, incident):
                    found[incident] = None
        return list(found)

    def _absorb(self, incident: Incident, other: Incident) -> None:
        """Merges two unreported incidents of one cause."""
        keys = self._open[other]
        self._close(other)
        self._new.remove(other)
        incident.merge(other)
        if incident.told:
            self._grown[incident] = self._grown.get(incident, 0) + other.total
        self._enter(incident, keys)

    def _enter(self, incident: Incident, keys: Iterable[Key]) -> None:
        own = self._open[incident]
        for key in keys:
            if key in own:
                self._index.move_to_end(key)
                continue
            own[key] = None
            self._index.setdefault(key, []).append(incident)
            self._links += 1
        while self._links > MOST_KEYS:
            key, known = self._index.popitem(last=False)
            self._links -= len(known)
            for one in known:
                del self._open[one][key]

    def _close(self, incident: Incident) -> None:
        own = self._open.pop(incident)
        self._links -= len(own)
        for key in own:
            known = self._index[key]
            known.remove(incident)
            if not known:
                del self._index[key]


_DAMAGE = frozenset({Kind.BYTES, Kind.ARRIVAL, Kind.NON_FINITE})
"""Kinds of wrong numbers, from which others are computed."""

_COMPUTED = frozenset({Kind.RECOMPUTE, Kind.ATTENTION})
"""Kinds of what a second computation finds: one cause, such as other weights, is in every request."""


def _keys(v: Violation) -> Iterator[Key]:
    """Keys of a finding, for itself and for others."""
    if v.slot is not None and v.slot >= 0:
        yield Link.SLOT, v.region, v.slot
    if v.page is not None and v.page >= 0:
        yield Link.PAGE, v.region, v.page
    yield Link.STEP, v.step, None
    if v.kind is Kind.BYTES and v.phase is Phase.PRE_FORWARD:
        # What a forward writes to a wrong place is compared before the next one.
        yield Link.STEP, v.step - 1, None
    for name in dict.fromkeys((None if v.kind is Kind.BYTES else v.request, v.stored_request)):
        if name is not None:
            yield Link.REQUEST, name, None
    if v.kind in _COMPUTED:
        yield Link.LAYER, (v.kind, v.rule, v.region), v.layer
    if v.kind is Kind.BYTES:
        yield Link.CONTENT, ("found", v.found_value), v.source
        yield Link.CONTENT, ("stored", v.stored_value), v.source


def _beside(v: Violation) -> Iterator[Key]:
    """Keys of related findings: on the page before or after, and those whose content is exchanged with ``v``'s."""
    if v.page is not None and v.page >= 0:
        yield Link.PAGE, v.region, v.page - 1
        yield Link.PAGE, v.region, v.page + 1
    if v.kind is Kind.BYTES and v.found_value is not None and v.stored_value is not None:
        yield Link.CONTENT, ("stored", v.found_value), v.source
        yield Link.CONTENT, ("found", v.stored_value), v.source


def _follows(link: Link, violation: Violation, incident: Incident) -> bool:
    """Whether ``violation``, linked to ``incident`` by ``link``, may be of the same cause."""
    if abs(violation.step - incident.last_step) > NEAR_STEPS[link]:
        return False
    if violation.kind is Kind.BYTES and (violation.step_written or 0) > incident.last_step:
        # What was written since was not there to be damaged.
        return False
    if incident.told:
        # What was told before is the cause, or the same.
        return any(link in registry.of(kind).brings.get(violation.kind, ()) for kind in incident.kinds)
    return any(link in registry.links(kind, violation.kind) for kind in incident.kinds)
