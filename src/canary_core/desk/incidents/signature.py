"""`Signature`: the sort of an incident, equal over processes, replicas, ranks and restarts."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from canary_core.desk.incidents.evidence import Evidence
from canary_core.incident import Incident
from canary_core.kinds.case import Pattern
from canary_core.records import Kind

MOST_LAYERS = 4
"""Layers listed by number; more are ``many``."""

MOST_ORIGIN = 64
"""Characters of an origin's name."""

NONE = "-"
"""A part that does not apply, or is unknown."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Kind of the root, name of the surest diagnosis, damaged layers (numbers, ``all``, ``many``), shape of the damaged
    bytes (`Pattern.shape`, ``mixed``), origin of loaded bytes. A part is ``-`` where it does not apply. Neither a slot,
    a request, a token nor a place is in it."""

    kind: str
    diagnosis: str
    layers: str = NONE
    pattern: str = NONE
    origin: str = NONE

    @property
    def text(self) -> str:
        """The five parts with colons between, for people and for patterns of a suppressions file."""
        return ":".join((self.kind, self.diagnosis, self.layers, self.pattern, self.origin))

    @property
    def id(self) -> str:
        """12 hexadecimal digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


def signature(incident: Incident, evidence: Evidence | None, seen: Sequence[Pattern]) -> Signature:
    """The signature of an incident with its diagnoses, by the findings, and by evidence where there is any."""
    origins = sorted({v.origin for v in incident.findings if v.origin})
    shapes = sorted({p.shape for p in seen})
    return Signature(
        kind=incident.root.kind.name.lower(),
        diagnosis=incident.diagnoses[0].name if incident.diagnoses else NONE,
        layers=_layers(incident, evidence),
        pattern=NONE if not shapes else shapes[0] if len(shapes) == 1 else "mixed",
        origin=re.sub(r"[^\w.@+-]", "_", origins[0])[:MOST_ORIGIN] if origins else NONE,
    )


def content_digest(incident: Incident) -> str:
    """12 hexadecimal digits for the root's damaged KV: equal where the same wrong bytes lie in the same source. Made of
    a fingerprint of KV, never of tokens; empty for kinds that are not about damaged bytes."""
    root = incident.root
    if root.kind not in (Kind.BYTES, Kind.ARRIVAL) or root.found_value is None:
        return ""
    return hashlib.sha256(f"{root.source}:{root.found_value}".encode()).hexdigest()[:12]


def _layers(incident: Incident, evidence: Evidence | None) -> str:
    same = [v for v in incident.findings if v.kind is incident.root.kind]
    named = {} if evidence is None else {s.name: s.layer for s in evidence.sources}
    found = {v.layer for v in same if v.layer is not None} | {
        named[name] for v in same for name in v.sources or () if name in named
    }
    if not found:
        return NONE
    if len(found) > 1 and found == set(named.values()):
        return "all"
    return "many" if len(found) > MOST_LAYERS else ",".join(map(str, sorted(found)))
