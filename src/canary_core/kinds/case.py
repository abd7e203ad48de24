"""`Case`: an incident with the evidence on it, as rules of diagnosis see both."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from canary_core.kinds.facts import NAMELESS, Facts, counted, named
from canary_core.records import Kind


@dataclass(frozen=True, slots=True)
class Copy:
    """The bytes found in ``slot`` of ``source`` belong, by the records, to ``other_slot`` of ``other_source``."""

    slot: int
    source: str
    other_slot: int
    other_source: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """The shape of a slot's bytes in one source where the bytes differ from the record.

    shape: ``bit`` (few bits of one word, or bits of one of its bytes), ``word`` (one word), ``two_bits`` (one bit in
    each of two words), ``zeros``, ``constant`` (every byte the same), ``nan`` (most numbers are NaN or infinite),
    ``other``.
    words, old, new: the changed 32-bit words by index, before and after, where the fingerprint's algebra tells: a sum
    of words times odd keys, so one changed word leaves ``difference / key`` behind. byte: the value of a ``constant``.
    not_finite: share of the numbers that are NaN or infinite.
    """

    slot: int
    source: str
    shape: str
    words: tuple[int, ...] = ()
    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    byte: int | None = None
    not_finite: float = 0.0


@dataclass(slots=True, eq=False)
class Damage:
    """Where the bytes of an incident differ; a cell is a slot in a source. ``copies``: cells with the bytes of another
    cell, of ``looked_up`` cells. ``exchanged``: by slot another one that holds what the slot should, and the reverse.
    ``donors_intact``: every cell named by ``copies`` as the owner of bytes has the bytes itself. ``all_layers``,
    ``all_halves``: numbers of the region, 0 if unknown. ``several``: where nothing says which differ of sources that
    share fingerprints; each of them has cells then. ``every``: the distance between damaged positions, if constant and
    with intact positions between. ``edge``: of each page only the first, or only the last, slot is damaged.

    Texts are parts of sentences, empty where they do not apply.
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
    exchanged: dict[int, int] = field(default_factory=dict)
    donors_intact: bool = False
    where: str = ""
    layout: tuple[str, ...] = ()
    several: str = ""
    every: int | None = None
    edge: bool = False
    edges: tuple[str, ...] = ()
    torn: str = ""
    whole_page: str = ""
    shared: str = ""
    arrived: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A slot that changed hands. ``step``: when its reader had it for the last time. ``given_back``: the step at which
    it was freed, evicted or parked after that, None if no such event is known. ``again``: when it was handed out to
    somebody else."""

    step: int
    given_back: int | None
    again: int


@dataclass(slots=True, eq=False)
class Case(ABC):
    """An incident with the evidence on it. ``root``: the first finding by cause. ``slots``, ``pages``: numbers of
    different ones in the findings. ``patterns``: shapes of damaged bytes.

    The other members come from records and bytes. Without evidence they are None, 0, False or empty.
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
        """The root's reading or writing request, in words."""
        return named(self.root.request) or NAMELESS

    def of(self, *kinds: Kind) -> list[Facts]:
        """Findings of ``kinds``."""
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
        """The slot with the right content for the root's request and position."""

    @property
    @abstractmethod
    def only_a_hit(self) -> bool:
        """Whether the root's request had written nothing before: a prefix hit brought everything."""

    @property
    @abstractmethod
    def was_cached(self) -> bool:
        """Whether the prefix cache has, or had, the content of the root's slot."""

    @property
    @abstractmethod
    def held_before(self) -> Held | None:
        """How the root's slot went from the root's request to somebody else, None if it did not, or not for certain."""

    @property
    @abstractmethod
    def had_it(self) -> bool | None:
        """Whether the root's request ever had the root's slot, as far as its history goes; None where nothing says."""

    @property
    @abstractmethod
    def handed_to(self) -> str | None:
        """The request that the root's slot was handed out to for the last time, in words; None if unknown."""

    @property
    @abstractmethod
    def reader_last(self) -> int | None:
        """The last position written by the root's request before the root's forward, -1 for none, None if unknown."""

    @property
    @abstractmethod
    def cleared(self) -> int | None:
        """The step at which the root's slot was cleared, if nothing was written since."""

    @property
    @abstractmethod
    def damage(self) -> Damage:
        """Where bytes differ."""

    @abstractmethod
    def record(self, slot: int) -> Sequence[int] | None:
        """The record's eight words (see `canary_core.records`), None if the slot was not looked at."""

    @abstractmethod
    def name(self, writer: int) -> str | None:
        """The request with this writer id."""
