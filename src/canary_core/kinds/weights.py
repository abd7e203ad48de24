"""`weights`: bytes of a parameter changed, and nobody has updated it."""

from collections.abc import Iterator

from canary_core.kinds.bytes import FLIPPED_BIT, MEMORY
from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.finding_kind import Blame, FindingKind, Page, Remedy, Sentence, Wrong
from canary_core.kinds.links import Link
from canary_core.records import Kind

OVERWRITTEN_WEIGHT = Class(
    "overwritten_weight",
    "a parameter that was written over",
    (),
    ("Look at what lies beside the parameter in memory, and for a kernel that writes beyond its output.",),
)


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    told = (case.explanation,)
    if ", bit " in (case.root.detail or ""):
        yield Diagnosis(FLIPPED_BIT, "likely", told)
        yield Diagnosis(OVERWRITTEN_WEIGHT, "possible", told)
    else:
        yield Diagnosis(OVERWRITTEN_WEIGHT, "likely", told)


KIND = FindingKind(
    kind=Kind.WEIGHTS,
    place=5,
    sentences=(
        Sentence(
            "element {v.element} of {parameter} was {was} and is {is_now}{different}, and nobody has updated the "
            "weights: a flipped bit or a stray write. Every answer since may be wrong.",
            when=lambda v: v.element is not None,
        ),
        Sentence(
            "{parameter} changed{different}, and nobody has updated the weights: a stray write. Every answer since may "
            "be wrong."
        ),
    ),
    brings={Kind.WEIGHTS: {Link.STEP}, Kind.NON_FINITE: {Link.STEP}},
    diagnose=_diagnose,
    classes=(FLIPPED_BIT, OVERWRITTEN_WEIGHT),
    blame=Blame("hooks", "weights are updated around their version counters: call Canary.guard_weights after it"),
    page=Page(
        wrong=Wrong.WEIGHTS,
        means="""
        Bytes of a parameter are not those that it had when the model was loaded, or last updated, and nothing says
        that somebody wanted it (`CANARY_WEIGHTS`). `source` is the parameter's name. Where one 32-bit word changed,
        `element` is the number of the first element that did, `old` and `new` are its values with their bits, and
        `detail` has its indices and the bit; else `detail` has the range of bytes, at most 64 KiB. No slot and no
        request is concerned: every answer since the change may be wrong.
        """,
        causes="""
        A flipped bit in the device's memory. A kernel that writes beyond its output, or to memory that was freed and
        given to the weights.
        """,
        next_steps="""
        Load the weights again: a restart, or the engine's own reload. One bit on one machine: a memory test. What
        writes parameters past torch's version counters must say so (`Canary.guard_weights`); where a change may be
        such an update it is counted (`weights_unsure`) and not told.
        """,
        remedies=(
            MEMORY,
            Remedy("a stray write over the weights", "restart, which loads them again; report it"),
        ),
    ),
)
