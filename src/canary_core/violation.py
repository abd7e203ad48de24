"""`Violation`: one decoded finding, with a plain sentence naming the likely class of bug."""

from dataclasses import dataclass

from canary_core.records import Kind, Phase, State


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding. Unknown fields are None. ``step`` is the forward, counted from 1, whose check found it. ``node`` is
    the engine's number of a prefix cache's node; ``rule`` names what its structure breaks, ``detail`` says how."""

    kind: Kind
    region: str
    phase: Phase
    step: int
    slot: int | None = None
    page: int | None = None
    source: str | None = None
    layer: int | None = None
    half: str | None = None
    position: int | None = None
    token: int | None = None
    stored_state: State | None = None
    stored_position: int | None = None
    stored_token: int | None = None
    stored_value: int | None = None
    found_value: int | None = None
    request: str | None = None
    stored_request: str | None = None
    step_written: int | None = None
    step_freed: int | None = None
    freed_by: str | None = None
    rank: int = 0
    node: int | None = None
    rule: str | None = None
    detail: str | None = None

    def fields(self) -> dict[str, object]:
        """The known fields as plain values, for an event or JSON; hashes as hexadecimal text."""
        out: dict[str, object] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, (Kind, Phase, State)):
                value = value.name.lower()
            elif name in ("stored_value", "found_value") and self.kind not in (Kind.WRITE_SLOT, Kind.TWO_WRITERS):
                value = f"{value & (1 << 64) - 1:016x}"
            out[name] = value
        return {**out, "explanation": self.explanation}

    @property
    def explanation(self) -> str:
        """What happened and what usually causes it."""
        return _EXPLANATIONS[self.kind].format(
            where=self._where(),
            reader=self._reader(),
            node=self._node(),
            writer=self.stored_request or "an unknown request",
            freer=self.freed_by or "the engine",
            v=self,
        )

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} in region {self.region}, step {self.step}: {self.explanation}"

    def _reader(self) -> str:
        if self.phase is Phase.SWEEP:
            return f"a hit on {self._node()}"
        return self.request or "a request"

    def _node(self) -> str:
        return "the prefix cache" if self.node is None else f"node {self.node} of the prefix cache"

    def _where(self) -> str:
        source = f" of {self.source}" if self.source else ""
        return f"slot {self.slot} (page {self.page}){source}"


_EXPLANATIONS = {
    Kind.SLOT_RANGE: "{reader} reads position {v.position} through table entry {v.slot}, which is no slot of the pool: "
    "a table row was overwritten, is stale, or was never filled.",
    Kind.NULL_SLOT: "{reader} uses the null slot {v.slot} for position {v.position}: padding leaked into a live row, "
    "or a window entry was evicted while still readable.",
    Kind.UNWRITTEN: "{reader} will read position {v.position} from {where}, which no forward has written: a prefix was "
    "published before it was filled, a write was lost, or the table points elsewhere.",
    Kind.FREED: "{reader} will read position {v.position} from {where}, which was freed by {freer} "
    "at step {v.step_freed}: use after free.",
    Kind.POSITION: "{reader} will read position {v.position} from {where}, but {writer} wrote position "
    "{v.stored_position} there at step {v.step_written}: wrong slot mapping, or the slot was handed out twice.",
    Kind.TOKEN: "{reader} expects token {v.token} at position {v.position}, {where} holds token {v.stored_token} "
    "written by {writer} at step {v.step_written}: another request's prefix, or a rejected draft left behind.",
    Kind.PREFIX: "{reader} will read position {v.position} from {where}, whose prefix is not the one before it: it "
    "belongs to a sequence of {writer}, written at step {v.step_written}.",
    Kind.BYTES: "the bytes of {where} changed since {writer} wrote them at step {v.step_written}: a stray write, a "
    "race, a bad copy, or a flipped bit.",
    Kind.LOST_WRITE: "{reader} should have written token {v.token} at position {v.position} to {where}, whose bytes "
    "are what they were before: the store went elsewhere or never ran.",
    Kind.WRITE_INPUT: "the forward computed token {v.stored_token} at position {v.stored_position} for {reader}, whose "
    "own token at position {v.position} is {v.token}: the batch was assembled wrongly.",
    Kind.WRITE_SLOT: "{reader} writes position {v.position} to {where}, but will read it from slot {v.stored_value}: "
    "the slot list and the table disagree.",
    Kind.TWO_WRITERS: "two tokens of one batch are written to {where}; {reader} (position {v.position}) lost to token "
    "{v.stored_value} of the batch: the slot was handed out twice.",
    Kind.DOUBLE_FREE: "{where} was freed by {reader} although it was free, by {freer}, since step "
    "{v.step_freed}: freed twice.",
    Kind.DOUBLE_ALLOC: "{where} was handed out to {reader} while {writer}, who got or wrote it at step "
    "{v.step_written}, still has it: allocated twice, or a free was lost.",
    Kind.WRITE_AFTER_FREE: "{reader} wrote position {v.position} to {where}, which {writer} freed at step "
    "{v.step_freed} and nobody was given since: write after free.",
    Kind.CACHE_STRUCTURE: "{node} is broken: {v.detail}.",
    Kind.NON_FINITE: "{reader} wrote a NaN or infinite value at position {v.position} to {where}: numerics, or "
    "poisoned padding.",
}
