"""`Facts`: the fields of one finding, as values and as parts of sentences."""

from dataclasses import dataclass

from canary_core.records import Kind, Phase, State


@dataclass(frozen=True, slots=True)
class Facts:
    """Fields of one finding; `Violation` adds the sentence. Unknown fields are None.

    ``step``: the forward of the check, counted from 1. ``node``: the engine's number of a prefix cache's node; ``rule``
    names the broken rule of the cache's structure, ``detail`` says how. ``origin`` brought bytes with differences in
    ``sources``. ``identity``: of the reading request, in words (`Identities`), where the content was computed for
    another one, ``stored_identity``. ``arrived``: the content was copied or loaded into the slot and written elsewhere.
    ``window``: the region is a sliding window's, with slots of its own. ``element``: of the parameter ``source``, its
    number; the value was ``old`` and is ``new``, each with its bits. ``odd_rank`` alone differs from the other ranks.
    """

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
    element: int | None = None
    old: str | None = None
    new: str | None = None
    odd_rank: int | None = None

    def words(self) -> dict[str, object]:
        """Parts of sentences by name, for `Sentence.text`. The part for an unknown request, slot or step says so or is
        empty."""
        return {
            "where": self._where(),
            "reader": self._reader(),
            "node": self._node(),
            "writer": named(self.stored_request) or NAMELESS,
            "written": _at("step", self.step_written),
            "freer": named(self.freed_by) or "the engine",
            "freed": _at("step", self.step_freed) or " before the first forward",
            "slot": f"{counted('slot', self.slot)}{self._pool()}",
            "layer": counted("layer", self.layer),
            "null": self._null(),
            "position": counted("position", self.position),
            "token": counted("token", self.token),
            "own_token": counted("token", self.token, "another"),
            "given_token": counted("token", self.stored_token),
            "stored_position": counted("position", self.stored_position, "another"),
            "stored_token": counted("token", self.stored_token, "another"),
            "other_token": counted("token", self.stored_value, "another"),
            "wrote": self._wrote(),
            "origin": self.origin or "something",
            "place": counted("slot", self.slot) if self.page is None or self.page < 0 else f"page {self.page}",
            "different": f", {self.detail}" if self.detail else "",
            "identity": self.identity,
            "stored_identity": self.stored_identity or "an identity whose name is not known",
            "table": self.detail or "a table of the attention backend",
            "kept": counted("slot", self.stored_value, "another"),
            "off": self._off(),
            "ranks": self.detail or "ranks of one engine differ in what they must compute alike",
            "parameter": f"parameter {self.source}" if self.source else "a parameter whose name is not known",
            "was": self.old or "another value",
            "is_now": self.new or "changed",
            "detail": self.detail or f"it contradicts itself{f' ({self.rule})' if self.rule else ''}",
            "v": self,
        }

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

    def _off(self) -> str:
        """How far the found length is from the right one."""
        more = (self.found_value or 0) - (self.stored_value or 0)
        return f"{abs(more)} too {'many' if more > 0 else 'few'}"

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
        """The pool of the slot, where another pool has a slot of the same number."""
        return f" in the window pool {self.region}" if self.window else ""


ABSORBED = "NaN or infinite numbers, which the same numbers written again do not change"
"""`Facts.detail` of a write that left no trace since it wrote NaN over NaN, or did not happen."""

WEIGHTS = "the weights of "
"""How an identity begins that differs from another in its weights."""

CONTENT = "at position"
"""How an identity begins that differs from another in what stands in the place of tokens."""

ENCODED = "the encoder's states"
"""How content begins that an encoder made, of which cross-attention keeps K and V."""

NAMELESS = "a request whose name is not known"
"""The subject of a sentence where the writer's number never had a name, or has none any more."""


def named(request: str | None) -> str | None:
    """A request as the subject of a sentence, None without a name. Digits alone become ``request 7``."""
    name = str(request) if request else None
    return f"request {name}" if name and name.lstrip("-").isdigit() else name


def counted(what: str, number: int | None, article: str = "a") -> str:
    """Such as ``slot 4``; where the number is not known, ``a slot``, or with another ``article``."""
    return f"{article} {what}" if number is None or number < 0 else f"{what} {number}"


def _at(what: str, number: int | None) -> str:
    return "" if number is None or number < 1 else f" at {what} {number}"
