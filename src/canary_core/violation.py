"""`Violation`: one decoded finding, with a plain sentence naming the likely class of bug."""

from collections.abc import Callable
from dataclasses import dataclass

from canary_core.records import Kind, Phase, State


@dataclass(frozen=True, slots=True)
class Violation:
    """One finding. Unknown fields are None. ``step`` is the forward, counted from 1, whose check found it. ``node`` is
    the engine's number of a prefix cache's node; ``rule`` names what its structure breaks, ``detail`` says how.
    ``origin`` brought bytes that differ in ``sources``. ``identity``: of a request that reads what was computed for
    another one, ``stored_identity``, in words (`Identities`). ``arrived``: the slot's content was copied or loaded
    there, the writer wrote it elsewhere. ``window``: the region is a sliding window's, with slots of its own."""

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
    origin: str | None = None
    sources: tuple[str, ...] | None = None
    arrived: bool | None = None
    identity: str | None = None
    stored_identity: str | None = None
    window: bool | None = None

    def fields(self) -> dict[str, object]:
        """The known fields as plain values, for an event or JSON; hashes as hexadecimal text."""
        out: dict[str, object] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, (Kind, Phase, State)):
                value = value.name.lower()
            elif name == "sources":
                value = list(value)
            elif name in ("stored_value", "found_value") and not self._has_number:
                value = f"{value & (1 << 64) - 1:016x}"
            out[name] = value
        return {**out, "explanation": self.explanation}

    @property
    def explanation(self) -> str:
        """What happened and what usually causes it. Says only what is known."""
        sentence = next((text for kind, holds, text in _SPECIAL if kind is self.kind and holds(self)), None)
        return (sentence or _EXPLANATIONS[self.kind]).format(
            where=self._where(),
            reader=self._reader(),
            node=self._node(),
            writer=named(self.stored_request) or NAMELESS,
            written=_at("step", self.step_written),
            freer=named(self.freed_by) or "the engine",
            freed=_at("step", self.step_freed) or " before the first forward",
            slot=f"{counted('slot', self.slot)}{self._pool()}",
            null=self._null(),
            position=counted("position", self.position),
            token=counted("token", self.token),
            stored_position=counted("position", self.stored_position, "another"),
            stored_token=counted("token", self.stored_token, "another"),
            other_token=counted("token", self.stored_value, "another"),
            wrote=self._wrote(),
            origin=self.origin or "something",
            place=counted("slot", self.slot) if self.page is None or self.page < 0 else f"page {self.page}",
            different=f", {self.detail}" if self.detail else "",
            identity=self.identity,
            stored_identity=self.stored_identity or "an identity whose name is not known",
            table=self.detail or "a table of the attention backend",
            kept=counted("slot", self.stored_value, "another"),
            detail=self.detail or f"it contradicts itself{f' ({self.rule})' if self.rule else ''}",
            v=self,
        )

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step > 0 else "before the first forward"
        return f"{self.kind.name.lower()} in region {self.region}, {step}: {self.explanation}"

    @property
    def _has_number(self) -> bool:
        """Whether ``stored_value`` is a slot or a token, and no hash."""
        sampled = self.kind is Kind.TOKEN and self.phase is Phase.POST_FORWARD
        numbered = (Kind.WRITE_SLOT, Kind.TWO_WRITERS, Kind.WRITE_INPUT, Kind.READ_TABLE)
        return sampled or self.kind in numbered

    def _reader(self) -> str:
        if self.phase is Phase.SWEEP:
            return f"a hit on {self._node()}"
        return named(self.request) or ("the engine" if self.phase is Phase.EVENT else NAMELESS)

    def _wrote(self) -> str:
        """The clause on who wrote the slot before; empty where nobody is known to have."""
        if self.step_written is None:
            return ""
        writer = named(self.stored_request) or NAMELESS
        if self.arrived:
            return f"; what was copied or loaded there before is of {writer}"
        return f"; {writer} wrote it{_at('step', self.step_written)}"

    def _node(self) -> str:
        cache = "the prefix cache"
        return cache if self.node is None or self.node < 0 else f"node {self.node} of {cache}"

    def _null(self) -> str:
        if self.slot is not None and self.slot < 0:
            return "a negative slot number"
        null = "the null slot" if self.slot is None else f"the null slot {self.slot}"
        source = f" of {self.source}" if self.source else ""
        return f"{null}{source}{self._pool()}"

    def _where(self) -> str:
        source = f" of {self.source}" if self.source else ""
        page = "" if self.page is None or self.page < 0 else f" (page {self.page})"
        return f"{counted('slot', self.slot)}{page}{source}{self._pool()}"

    def _pool(self) -> str:
        """Whose slot it is, where the same number is also one of another pool."""
        return f" in the window pool {self.region}" if self.window else ""


NAMELESS = "a request whose name is not known"
"""The subject of a sentence where nobody has given the writer's number a name, or it was forgotten."""


def named(request: str | None) -> str | None:
    """A request as the subject of a sentence, None where it has no name. A name that is only a number says what it is
    the number of."""
    name = str(request) if request else None
    return f"request {name}" if name and name.lstrip("-").isdigit() else name


def _at(what: str, number: int | None) -> str:
    return "" if number is None or number < 1 else f" at {what} {number}"


def counted(what: str, number: int | None, article: str = "a") -> str:
    """Such as ``slot 4``; where the number is not known, ``a slot``, or with another ``article``."""
    return f"{article} {what}" if number is None or number < 0 else f"{what} {number}"


_EXPLANATIONS = {
    Kind.SLOT_RANGE: "{reader} reads {position} through table entry {v.slot}, which is no slot of the pool: a table "
    "row was overwritten, is stale, or was never filled.",
    Kind.NULL_SLOT: "{reader} uses {null} for {position}: padding leaked into a live row, its row of the table is "
    "another request's, or was not filled so far, or a window entry was evicted while still readable.",
    Kind.UNWRITTEN: "{reader} will read {position} from {where}, which no forward has written: a prefix was published "
    "before it was filled, a write was lost, or the table points elsewhere.",
    Kind.FREED: "{reader} will read {position} from {where}, which was freed by {freer}{freed}{wrote}: use after free.",
    Kind.POSITION: "{reader} will read {position} from {where}, but {writer} wrote {stored_position} "
    "there{written}: wrong slot mapping, a prefix match that is out of date, or the slot was handed out twice.",
    Kind.TOKEN: "{reader} expects {token} at {position}, {where} holds {stored_token} written by "
    "{writer}{written}: another request's prefix or image, or a rejected draft left behind.",
    Kind.PREFIX: "{reader} will read {position} from {where}, whose prefix is not the one before it: it belongs to a "
    "sequence that {writer} wrote{written}.",
    Kind.BYTES: "the bytes of {where} changed since {writer} wrote them{written}: a stray write, a race, a bad copy, "
    "or a flipped bit.",
    Kind.LOST_WRITE: "{reader} should have written {token} at {position} to {where}, whose bytes are what they were "
    "before: the store went elsewhere or never ran.",
    Kind.WRITE_INPUT: "the forward computed {stored_token} at {stored_position} for {reader}, whose "
    "own token at {position} is {v.token}: the batch was assembled wrongly.",
    Kind.WRITE_SLOT: "{reader} writes {position} to {where}, but will read it from slot {v.stored_value}: the slot "
    "list and the table disagree.",
    Kind.TWO_WRITERS: "two tokens of one batch are written to {where}; {reader} ({position}) lost to "
    "{other_token} of the batch: the slot was handed out twice, or padding stores in a slot of the pool.",
    Kind.DOUBLE_FREE: "{where} was freed by {reader} although it was free, since {freer} freed it{freed}: freed twice.",
    Kind.DOUBLE_ALLOC: "{where} was handed out to {reader} while {writer}, who wrote it{written}, still has it: "
    "allocated twice, or a free was lost.",
    Kind.WRITE_AFTER_FREE: "{reader} wrote {position} to {where}, which {freer} freed{freed} and nobody was given "
    "since: write after free.",
    Kind.EVICTED_IN_USE: "{where} was evicted from the prefix cache while a request has it: it was handed out or "
    "shared and not released since. {writer} wrote it{written}. A lock was lost, or taken back too early.",
    Kind.CACHE_STRUCTURE: "{node} is broken: {detail}.",
    Kind.ARRIVAL: "the bytes that came back are not those that were stored for this prefix: {origin} brought {place} "
    "for {reader}{different}.",
    Kind.READ_TABLE: "{table} names {where} for {position} of {reader}, for which the engine keeps {kept}: attention "
    "was given a table that is stale or was made wrongly.",
    Kind.NON_FINITE: "{reader} wrote a NaN or infinite value at {position} to {where}: numerics, or poisoned padding.",
}

_SPECIAL: tuple[tuple[Kind, Callable[[Violation], bool], str], ...] = (
    (
        Kind.SLOT_RANGE,
        lambda v: v.phase is Phase.EVENT,
        "{reader} took or gave back {slot}, which is no slot of the pool: a list of the allocator or of the "
        "prefix cache is broken.",
    ),
    (
        Kind.NULL_SLOT,
        lambda v: v.phase is Phase.EVENT,
        "{reader} took or gave back {null}, which is for padding only: a list of the allocator or of "
        "the prefix cache is broken.",
    ),
    (
        Kind.SLOT_RANGE,
        lambda v: v.phase is Phase.POST_FORWARD and (v.slot is None or v.slot < 0),
        "{reader} writes {position}, for which the batch has no slot: the adapter's write_slots or table are shorter "
        "than the request.",
    ),
    (
        Kind.SLOT_RANGE,
        lambda v: v.slot is None or v.slot < 0,
        "{reader} reads {position}, for which the table has no entry: it is narrower than the request is long, or the "
        "request's length is wrong.",
    ),
    (
        Kind.SLOT_RANGE,
        lambda v: v.phase is Phase.POST_FORWARD,
        "{reader} writes {position} to {slot}, which is no slot of the pool: the slot list is stale or was "
        "never filled.",
    ),
    (
        Kind.NULL_SLOT,
        lambda v: v.phase is Phase.POST_FORWARD,
        "{reader} writes {position} to {null}, where it is lost: padding leaked into a live row.",
    ),
    (
        Kind.FREED,
        lambda v: v.phase is Phase.EVENT,
        "{reader} was given {where} by the prefix cache, but {freer} freed it{freed}: a prefix hit on a freed slot.",
    ),
    (
        Kind.BYTES,
        lambda v: v.phase is Phase.POST_FORWARD and v.layer is not None and v.layer >= 0,
        "the bytes of {where} changed between the store of layer {v.layer} and the end of the forward in which "
        "{reader} wrote {position} there: a stray write, a race with the forward, or a flipped bit.",
    ),
    (
        Kind.BYTES,
        lambda v: v.phase is Phase.EVENT and bool(v.arrived),
        "the bytes that were copied or loaded to {where} are not those that {writer} wrote{written}: they were left "
        "out, came from the wrong place or too early, or had changed before.",
    ),
    (
        Kind.NON_FINITE,
        lambda v: v.phase is Phase.POST_FORWARD and (v.position is None or v.position < 0),
        "NaN or infinite values got into {null}, where padding is written: a padded row computed them, or a "
        "write went astray. Attention that reads padding under a mask can spread them to live requests.",
    ),
    (
        Kind.UNWRITTEN,
        lambda v: v.stored_state is State.PARKED,
        "{reader} will read {position} from {where}, which the prefix cache keeps although nothing was written there "
        "since it was handed out or cleared{wrote}: a prefix was published before it was filled, or a write was lost.",
    ),
    (
        Kind.UNWRITTEN,
        lambda v: v.stored_state is State.ALLOCATED and v.step_written is not None,
        "{reader} will read {position} from {where}, which was handed out again since {writer} wrote it{written}, and "
        "not written since: the slot was freed too early, a prefix was published before it was filled, or a write was "
        "lost.",
    ),
    (
        Kind.UNWRITTEN,
        lambda v: v.stored_state is State.ALLOCATED,
        "{reader} will read {position} from {where}, which was handed out and never written: a prefix was published "
        "before it was filled, or a write was lost.",
    ),
    (
        Kind.UNWRITTEN,
        lambda v: v.step_written is not None,
        "{reader} will read {position} from {where}, which holds nothing since it was cleared or rolled back{wrote}: "
        "it was cleared too early, or the table still names it.",
    ),
    (
        Kind.BYTES,
        lambda v: bool(v.arrived),
        "the bytes of {where}, which were copied or loaded there, are not those that its record tells of "
        "({writer}{written}): a bad copy or transfer, a stray write, a race, or a flipped bit.",
    ),
    (
        Kind.POSITION,
        lambda v: bool(v.arrived),
        "{reader} will read {position} from {where}, but what was copied or loaded there is {stored_position} of "
        "{writer}: wrong slot mapping, a copy to the wrong slot, or a prefix match that is out of date.",
    ),
    (
        Kind.PREFIX,
        lambda v: bool(v.identity),
        "{reader} will read {position} from {where}, which {writer} computed{written} for another identity: "
        "{stored_identity}; {reader} has {identity}. A prefix hit across identities: the key of the prefix cache lacks "
        "what tells them apart.",
    ),
    (
        Kind.WRITE_INPUT,
        lambda v: v.stored_value is not None and v.stored_value >= 0,
        "the sampler gave {reader} {token} for {position}, but the forward computed {stored_token} there: the next "
        "tokens of two requests changed places, a rejected draft was kept, or a sequence length is wrong.",
    ),
    (
        Kind.TOKEN,
        lambda v: v.phase is Phase.EVENT,
        "the sampler gave {reader} {stored_token} for {position}, but the request's own list has {token} there: what "
        "is answered is not what the model goes on with.",
    ),
    (
        Kind.TOKEN,
        lambda v: v.phase is Phase.POST_FORWARD,
        "the sampler gave {reader} {token} for {position}, but {where}, from which it was read, holds {stored_token} "
        "that {writer} wrote{written}: a rejected draft was kept, or a sequence length is wrong.",
    ),
    (
        Kind.WRITE_INPUT,
        lambda v: v.token is None or v.token < 0,
        "the forward computed {stored_token} at {stored_position} for {reader}, who is at "
        "{position}: the batch was assembled wrongly.",
    ),
    (
        Kind.READ_TABLE,
        lambda v: v.slot is None or v.slot < 0,
        "{table} names no slot for {position} of {reader}, for which the engine keeps {kept}: attention was given a "
        "table that is stale or was made wrongly.",
    ),
    (
        Kind.READ_TABLE,
        lambda v: v.stored_state is State.WRITTEN and v.step_written is not None,
        "{table} names {where} for {position} of {reader}, for which the engine keeps {kept}; {writer} wrote "
        "{stored_position} to {where}{written}. Attention was given a table that is stale or was made wrongly.",
    ),
    (
        Kind.WRITE_SLOT,
        lambda v: v.stored_value is None or v.stored_value < 0,
        "{reader} writes {position} to {where}, but the table has no slot for it: the slot list and the table "
        "disagree.",
    ),
    (
        Kind.DOUBLE_FREE,
        lambda v: v.stored_state is State.PARKED and (v.step_freed is not None or v.freed_by is not None),
        "{where} was released by {reader} although no request has it: {freer} let go of it{freed}, and the prefix "
        "cache keeps it since: released twice.",
    ),
    (
        Kind.DOUBLE_FREE,
        lambda v: v.stored_state is State.PARKED,
        "{where} was released by {reader} although no request has it and the prefix cache keeps it: released twice, or "
        "listed twice in one call.",
    ),
    (
        Kind.DOUBLE_FREE,
        lambda v: v.step_freed is None and v.freed_by is None,
        "{where} was freed by {reader} although it was free already: freed twice, or listed twice in one call.",
    ),
    (
        Kind.EVICTED_IN_USE,
        lambda v: v.stored_state is State.ALLOCATED or v.step_written is None,
        "{where} was evicted from the prefix cache while a request has it: it was handed out and not released since. "
        "A lock was lost, or taken back too early.",
    ),
    (
        Kind.DOUBLE_ALLOC,
        lambda v: v.stored_state is State.PARKED and v.step_written is not None,
        "{where} was handed out to {reader} while the prefix cache keeps it; {writer} wrote it{written}: handed out "
        "before it was evicted.",
    ),
    (
        Kind.DOUBLE_ALLOC,
        lambda v: v.stored_state is State.PARKED,
        "{where} was handed out to {reader} while the prefix cache keeps it: handed out before it was evicted.",
    ),
    (
        Kind.DOUBLE_ALLOC,
        lambda v: v.stored_state is State.ALLOCATED,
        "{where} was handed out to {reader}, but it was handed out before and neither freed nor written since: "
        "allocated twice, or a free was lost.",
    ),
)
"""Sentences for what is known beyond the kind: the first whose condition holds is told instead of the kind's own."""
