"""`Class`: a sort of bug; `Diagnosis`: the class that an incident points to."""

from dataclasses import dataclass

SURE = ("certain", "likely", "possible")
"""How sure a diagnosis is: proven by a 64-bit fingerprint or the engine's own events; the usual meaning of such a
pattern; one of several explanations."""


@dataclass(frozen=True, slots=True)
class Class:
    """``title`` ends the sentence "this looks like ...". ``bugs``: public issues and pull requests of the same sort."""

    name: str
    title: str
    bugs: tuple[str, ...]
    next_steps: tuple[str, ...]


UNKNOWN = Class(
    "unknown",
    "none of the classes that are known here",
    (),
    ("Run the same traffic with CANARY_READ_CHECK=-1 and CANARY_MODE=raise, to come closer to the cause.",),
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``sure``: one of `SURE`. ``evidence``: observations, a sentence each."""

    what: Class
    sure: str
    evidence: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.what.name

    @property
    def sentence(self) -> str:
        """The class and the certainty."""
        verb = {"certain": "This is", "likely": "This is probably", "possible": "This may be"}[self.sure]
        return f"{verb} {self.what.title}."

    @property
    def bugs(self) -> tuple[str, ...]:
        """Public bugs of the same sort."""
        return self.what.bugs

    @property
    def next_steps(self) -> tuple[str, ...]:
        """The next things to do."""
        return self.what.next_steps

    def fields(self) -> dict[str, object]:
        """As plain values."""
        return {
            "diagnosis": self.name,
            "sure": self.sure,
            "sentence": self.sentence,
            "evidence": list(self.evidence),
            "resembles": list(self.bugs),
            "next_steps": list(self.next_steps),
        }
