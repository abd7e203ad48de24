"""`FindingKind`: one kind of finding, whole. Each kind's file has one, as ``KIND``."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.facts import Facts
from canary_core.kinds.links import CauseRow
from canary_core.records import Kind, Phase

Rule = Callable[[Case], Iterator[Diagnosis]]
"""From a case to the fitting diagnoses, in any order; none where no pattern is recognised."""


def always(found: Facts) -> bool:
    """The condition of a kind's last sentence."""
    return True


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence on the event and the usual causes, for findings that fulfil ``when``. Names in braces are those of
    `Facts.words`."""

    text: str
    when: Callable[[Facts], bool] = always


class Wrong(Enum):
    """Sorts of kinds: the rows of README.md's table, in order."""

    READ = "A forward reads the wrong slot"
    NOTHING = "A forward reads a slot that holds nothing"
    BYTES = "The bytes of a slot changed, on any layer, in K, V or a scale"
    WRITE = "A write went wrong"
    ALLOCATOR = "The allocator or the prefix cache made a mistake"
    CACHE = "The prefix cache contradicts itself"
    WEIGHTS = "A parameter of the model changed, and nobody updated it"
    RANKS = "Ranks that must compute the same have not"
    RECOMPUTED = "KV is not what the model computes from the tokens"
    ARRIVAL = "KV comes back wrong from host memory, a disk, another engine"


@dataclass(frozen=True, slots=True)
class Remedy:
    """A row of docs/runbook.md, for people on call at night: the usual cause and the next action. ``when``
    follows the kind's name where more than the kind must be seen."""

    usually: str
    do: str
    when: str = ""


ALLOCATOR = Remedy(
    "a bug of the engine's allocator or prefix cache",
    "go back to the engine's last release; turn the prefix cache off; report it with the text of "
    "`canary explain DIR --report`",
)
TABLE = Remedy(
    "a wrong table or a wrong batch, often with speculation or overlap scheduling",
    "turn these off one by one; report it",
)
KERNEL = Remedy("a kernel", "another attention backend; report it")


@dataclass(frozen=True, slots=True)
class Page:
    """``means``, ``causes`` and ``next_steps``: the three parts of the kind's section in docs/findings.md, as Markdown.
    An empty line ends a paragraph or a table; paragraphs are filled anew. ``remedies``: rows in docs/runbook.md, shared
    with other kinds or of this kind alone."""

    wrong: Wrong
    means: str
    causes: str
    next_steps: str
    remedies: tuple[Remedy, ...]


class Blame(NamedTuple):
    """Part of an adapter plugin to blame where a kind is found in an engine that does nothing wrong, and where to look
    in it."""

    part: Literal["PoolAdapter", "BatchAdapter", "slot events", "hooks"]
    hint: str


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One kind of finding.

    ``place``: number in the order from causes to effects; of two findings of one forward the lower place is the cause.
    ``sentences``: the first with a fulfilled condition is told; the last has none. ``brings``: the kinds that may
    follow, and the links between cause and effect. ``classes``: the possible classes of `diagnose`. ``blame``: for the
    conformance suite. ``numbers``: phases with a slot, token or index in ``stored_value``; in other phases
    ``stored_value`` is a hash.
    """

    kind: Kind
    place: int
    sentences: tuple[Sentence, ...]
    brings: CauseRow
    diagnose: Rule
    classes: tuple[Class, ...]
    blame: Blame
    page: Page
    numbers: Collection[Phase] = ()

    @property
    def name(self) -> str:
        """The name in findings and pages."""
        return self.kind.name.lower()

    def sentence(self, found: Facts) -> str:
        """The sentence about ``found``, a finding of this kind, with known facts only."""
        text = next(sentence.text for sentence in self.sentences if sentence.when(found))
        return text.format(**found.words())


def as_told(what: Class) -> Rule:
    """The rule of kinds with a single explanation: the root's own sentence is the evidence."""

    def rule(case: Case) -> Iterator[Diagnosis]:
        yield Diagnosis(what, "likely", (case.explanation,))

    return rule
