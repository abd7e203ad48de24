"""What is said of findings, as text: of crafted findings of each kind all sentences that differ, and all diagnoses.

python -m support.sentences > tests/incidents/sentences.txt     (with tests/ on PYTHONPATH)
"""

from collections.abc import Iterator
from dataclasses import replace

from canary_core import Kind, Phase, State, Violation
from canary_core.incident import Incident
from canary_core.kinds.facts import ABSORBED
from canary_desk.incidents.diagnosis import diagnose

KNOWN = {
    "slot": 40, "page": 2, "source": "k.1", "layer": 1, "half": "k", "position": 9, "token": 7, "stored_token": 3,
    "stored_state": State.WRITTEN, "stored_position": 5, "stored_value": 11, "found_value": 12, "request": "ann",
    "stored_request": "bob", "step_written": 4, "step_freed": 6, "freed_by": "77", "node": 3, "rule": "parent",
    "detail": "slot 4 is in the free list", "origin": "NixlConnector", "sources": ("k.1",),
}  # fmt: skip
UNKNOWN = dict.fromkeys(KNOWN)
NOT_FREED = {"step_freed": None, "freed_by": None}
VARIANTS = (
    KNOWN,
    UNKNOWN,
    {**KNOWN, "stored_value": None, "token": None, "position": None, "layer": None, "detail": None},
    {**KNOWN, "stored_value": None},
    {**KNOWN, "slot": -1},
    {**KNOWN, "step_written": None},
    {**KNOWN, **NOT_FREED},
    {**KNOWN, "stored_state": State.PARKED},
    {**KNOWN, "stored_state": State.PARKED, "step_written": None, **NOT_FREED},
    {**KNOWN, "stored_state": State.ALLOCATED},
    {**KNOWN, "stored_state": State.ALLOCATED, "step_written": None},
    {**KNOWN, "arrived": True, "window": True},
    {**KNOWN, "identity": "LoRA adapter sql", "stored_identity": "cache salt #0a1b2c3d"},
    {**KNOWN, "detail": ABSORBED},
    {**KNOWN, "identity": "the weights of change 2 (load_weights)", "stored_identity": "the weights of the start"},
    {**KNOWN, "identity": "at positions 3 to 12 embeddings #0a1b2c3d", "stored_identity": "tokens"},
    {**KNOWN, "identity": "at position 9 the encoder's states #0a1b2c3d", "stored_identity": "the encoder's states #1"},
    *({**KNOWN, "rule": rule} for rule in ("nothing_came", "left_out", "another_sequence", "another_identity")),
    *(
        {**KNOWN, "rule": rule}
        for rule in ("input", "brought", "attention", "everywhere", "half", "weights", "state", "values")
    ),
    {**KNOWN, "stored_value": None, "token": None, "stored_token": None, "stored_position": 9},
    {
        **KNOWN,
        "source": "layers.3.up.weight",
        "element": 70,
        "old": "1 (0x3f80)",
        "new": "-1 (0xbf80)",
        "detail": "[1, 6]",
    },
    {**KNOWN, "odd_rank": 3, "detail": "rank 3 (host a, process 7) alone differs from ranks 0, 1 and 2 in its KV"},
    {**KNOWN, "request": "bob", "source": None, "page": None, "stored_position": 9},
)


def text() -> str:
    """All kinds, in the order of their numbers."""
    return "\n".join(line for kind in Kind for line in (f"# {kind.name.lower()}", *dict.fromkeys(_lines(kind)), ""))


def _lines(kind: Kind) -> Iterator[str]:
    """Of each crafted finding its sentence, how its stored value is told, where it is a number, and its sentence
    without tokens; then what an incident of it alone probably is, where nobody has looked at the device."""
    for phase in Phase:
        for fields in VARIANTS if phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD, Phase.EVENT) else VARIANTS[:1]:
            found = Violation(kind, "full", phase, 8, **fields)
            number = found.fields().get("stored_value") == fields["stored_value"] is not None
            yield f"{found.explanation}{' (a number)' if number else ''}"
            if (redacted := found.redacted().explanation) != found.explanation:
                yield redacted
    for phase in (Phase.PRE_FORWARD, Phase.EVENT):
        for fields in VARIANTS if phase is Phase.PRE_FORWARD else VARIANTS[:1]:
            incident = Incident(Violation(kind, "full", phase, 8, **fields))
            incident.add(incident.root)
            same = replace(incident.root, token=None, stored_token=None).explanation
            for d in diagnose(incident, None, ()):
                evidence = "; ".join("its sentence without tokens" if e == same else e for e in d.evidence)
                yield f"- {d.name} ({d.sure}): {evidence}"


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201  (this is what it is for)
