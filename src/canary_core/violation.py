"""`Violation`: one decoded finding, with a plain sentence naming the likely class of bug."""

from dataclasses import dataclass, replace

from canary_core.kinds import registry
from canary_core.kinds.facts import Facts
from canary_core.records import Kind, Phase, State


@dataclass(frozen=True, slots=True)
class Violation(Facts):
    """One finding: `Facts`, where unknown fields are None, with a sentence and as fields of an event."""

    def fields(self) -> dict[str, object]:
        """The known fields as plain values, for an event or JSON; hashes as hexadecimal text."""
        numbers = self.phase in registry.of(self.kind).numbers
        out: dict[str, object] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, (Kind, Phase, State)):
                value = value.name.lower()
            elif name == "sources":
                value = list(value)
            elif name in ("stored_value", "found_value") and not numbers:
                value = f"{value & (1 << 64) - 1:016x}"
            out[name] = value
        return {**out, "explanation": self.explanation}

    def redacted(self) -> "Violation":
        """A copy without token ids, and without prefix hashes, by which tokens could be worked out; the finding itself
        if it has none."""
        stored, found = self.stored_value, self.found_value
        if self.kind not in _OF_NO_TOKEN:
            # That the sampler's token is known is no token.
            stored, found = (0 if self.kind is Kind.WRITE_INPUT and stored is not None else None), None
        if self.token is self.stored_token is None and (stored, found) == (self.stored_value, self.found_value):
            return self
        return replace(self, token=None, stored_token=None, stored_value=stored, found_value=found)

    @property
    def explanation(self) -> str:
        """A sentence on the event and the usual causes, with known facts only."""
        return registry.of(self.kind).sentence(self)

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step > 0 else "before the first forward"
        return f"{self.kind.name.lower()} in region {self.region}, {step}: {self.explanation}"


_OF_NO_TOKEN = frozenset(
    {
        Kind.BYTES, Kind.LOST_WRITE, Kind.NON_FINITE, Kind.ARRIVAL, Kind.WRITE_SLOT, Kind.READ_TABLE, Kind.READ_LENGTH,
        Kind.TWO_WRITERS, Kind.WEIGHTS, Kind.RANKS,
    }
)  # fmt: skip
"""Kinds whose values are fingerprints, slots, lengths, indices or forwards; others' are prefix hashes or tokens."""
