"""`Case`: an incident as a rule of diagnosis sees it. The desk makes one from an incident and its evidence."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from canary_core.kinds.facts import NAMELESS, Facts, counted, named
from canary_core.records import Kind


@dataclass(frozen=True, slots=True)
class Copy:
    """The bytes that were found in ``slot`` of ``source`` are those that the records say belong to ``other_slot`` of
    ``other_source``."""

    slot: int
    source: str
    other_slot: int
    other_source: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """The bytes of one slot in one source, which are not what was recorded.

    shape: ``bit`` (few bits of one word), ``word`` (one word), ``two_bits`` (one bit in each of two words), ``zeros``,
    ``constant`` (every byte the same), ``nan`` (most numbers are NaN or infinite), ``other``.
    words, old, new: which 32-bit words changed, as they were and as they are, where the fingerprint's algebra tells:
    a sum of words times odd keys, so one changed word leaves ``difference / key`` behind. byte: the value of a
    ``constant``. not_finite: share of the numbers that are NaN or infinite.
    """

    slot: int
    source: str
    shape: str
    words: tuple[int, ...] = ()
    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    byte: int | None = None
    not_finite: float = 0.0

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits that changed, counted from the slot's first one."""
        out = []
        for word, old, new in zip(self.words, self.old, self.new, strict=True):
            out += [word * 32 + bit for bit in range(32) if (old ^ new) >> bit & 1]
        return tuple(out)


@dataclass(slots=True, eq=False)
class Damage:
    """Where the bytes of an incident differ, and how these places lie in requests and pages. ``cells``: slots and
    sources that differ. ``copies``: those whose bytes belong elsewhere; ``looked_up``: of how many it was asked.
    ``all_layers``, ``all_halves``: how many the region has, 0 where that is not known. ``positions``: of damaged slots.
    ``every``: how far apart they are, where that is always the same and those between are intact. ``edge``: in each
    page the first slot, or the last one, is damaged.

    Texts are parts of sentences, empty where it is not so.
    """

    slots: list[int]
    sources: list[str]
    layers: set[int]
    halves: set[str]
    all_layers: int
    all_halves: int
    cells: int
    copies: list[Copy]
    looked_up: int
    positions: dict[int, int]
    where: str = ""
    layout: tuple[str, ...] = ()
    every: int | None = None
    edge: bool = False
    edges: tuple[str, ...] = ()
    torn: str = ""
    whole_page: str = ""
    shared: str = ""
    arrived: str = ""


@dataclass(slots=True, eq=False)
class Case(ABC):
    """An incident and what is known about it. ``root``: its first finding by cause; ``slots``, ``pages``: how many it
    concerns. ``patterns``: what damaged bytes look like, of those that were looked at.

    The rest is by records and bytes. Where nobody could look at them, each answer is the one that says nothing: None,
    0, False or an empty text.
    """

    root: Facts
    findings: Sequence[Facts]
    slots: int
    pages: int
    patterns: Sequence[Pattern]

    @property
    def slot(self) -> str:
        """The root's slot, in words."""
        return counted("slot", self.root.slot)

    @property
    def reader(self) -> str:
        """The request that reads or writes, in words."""
        return named(self.root.request) or NAMELESS

    def of(self, *kinds: Kind) -> list[Facts]:
        """Findings of these kinds."""
        return [v for v in self.findings if v.kind in kinds]

    @property
    @abstractmethod
    def explanation(self) -> str:
        """The root's sentence, without token ids."""

    @property
    @abstractmethod
    def sources(self) -> int:
        """How many sources the region has."""

    @property
    @abstractmethod
    def right_slot(self) -> int | None:
        """The slot that holds what the root's request should read there."""

    @property
    @abstractmethod
    def only_a_hit(self) -> bool:
        """Whether the root's request had written nothing before, so that a prefix hit brought all that it reads."""

    @property
    @abstractmethod
    def was_cached(self) -> bool:
        """Whether the prefix cache has, or had, what the root's slot holds."""

    @property
    @abstractmethod
    def handed_out_late(self) -> str:
        """That the root's slot was handed out again shortly before it was written, as a part of a sentence."""

    @property
    @abstractmethod
    def damage(self) -> Damage:
        """Where bytes differ."""

    @abstractmethod
    def record(self, slot: int) -> Sequence[int] | None:
        """The record's eight words (see `canary_core.records`), None if the slot was not looked at."""

    @abstractmethod
    def name(self, writer: int) -> str | None:
        """A request by its writer id."""
