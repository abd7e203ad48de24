"""`Signature`: the sort of an incident, equal over processes, replicas, ranks and restarts."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from canary_core.incident import Incident
from canary_core.kinds.case import Pattern
from canary_core.ops.fingerprint_keys import PUBLIC, FingerprintKeys
from canary_core.records import Kind
from canary_core.violation import Violation
from canary_desk.incidents.evidence import Evidence

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


def content_digest(incident: Incident, evidence: Evidence | None) -> str:
    """12 hexadecimal digits for the root's damaged KV: equal where the same wrong bytes lie in the same source, in
    every process. Made of the public fingerprint of KV, never of tokens; empty for kinds that are not about damaged
    bytes, and for bytes out of reach of a process with seeded keys."""
    root = incident.root
    if root.kind not in (Kind.BYTES, Kind.ARRIVAL) or root.found_value is None:
        return ""
    value: int | None = root.found_value
    if evidence is not None and evidence.keys is not None and evidence.keys.kind != "public":
        value = _public_value(root, evidence, evidence.keys)
    return "" if value is None else hashlib.sha256(f"{root.source}:{value}".encode()).hexdigest()[:12]


def _public_value(root: Violation, evidence: Evidence, keys: FingerprintKeys) -> int | None:
    """The public fingerprint of the root's bytes, if still the found ones. Of an arrival, whose value is of a block,
    the value under a secret, the same in all processes with the secret."""
    if root.kind is Kind.ARRIVAL:
        return root.found_value if keys.kind == "shared" else None
    row, column = evidence.row(-1 if root.slot is None else root.slot), evidence.column(root.source)
    if row is None or column is None or row not in evidence.read or root.source not in evidence.words:
        return None
    words = evidence.words[root.source][[evidence.read.index(row)]]
    same = int(keys.fingerprints(words, column)[0]) == root.found_value
    return int(PUBLIC.fingerprints(words, column)[0]) if same else None


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
