"""`FindingKind`: one kind of finding, whole. Each kind's file has one, as ``KIND``."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.facts import Facts
from canary_core.kinds.links import CauseRow
from canary_core.kinds.page import Page
from canary_core.records import Kind, Phase

Rule = Callable[[Case], Iterator[Diagnosis]]
"""From a case to the diagnoses that fit it, in any order; none where no pattern is recognised."""


def always(found: Facts) -> bool:
    """The condition of a kind's last sentence."""
    return True


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence on what happened and its usual cause, for findings for which ``when`` holds. Names in braces are
    those of `Facts.words`."""

    text: str
    when: Callable[[Facts], bool] = always


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One kind of finding.

    ``place``: where it stands between causes and effects; of two findings of one forward the one with the lower place
    is the cause. ``sentences``: the first whose condition holds is told; the last one always holds. ``brings``: the
    kinds that may follow from it, and what links each to it. ``classes``: what `diagnose` may name. ``numbers``: the
    phases in which ``stored_value`` is a slot, a token or an index; else it is a hash.
    """

    kind: Kind
    place: int
    sentences: tuple[Sentence, ...]
    brings: CauseRow
    diagnose: Rule
    classes: tuple[Class, ...]
    page: Page
    numbers: Collection[Phase] = ()

    @property
    def name(self) -> str:
        """As findings and pages have it."""
        return self.kind.name.lower()

    def sentence(self, found: Facts) -> str:
        """The sentence about ``found``, a finding of this kind. It says only what is known."""
        text = next(sentence.text for sentence in self.sentences if sentence.when(found))
        return text.format(**found.words())


def as_told(what: Class) -> Rule:
    """The rule of kinds that say by themselves what happened."""

    def rule(case: Case) -> Iterator[Diagnosis]:
        yield Diagnosis(what, "likely", (case.explanation,))

    return rule
