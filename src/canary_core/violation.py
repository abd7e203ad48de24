"""`Violation`: one decoded finding, with a plain sentence naming the likely class of bug."""

from dataclasses import dataclass

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

    @property
    def explanation(self) -> str:
        """A sentence on the event and the usual causes, with known facts only."""
        return registry.of(self.kind).sentence(self)

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step > 0 else "before the first forward"
        return f"{self.kind.name.lower()} in region {self.region}, {step}: {self.explanation}"
