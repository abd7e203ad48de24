"""`write_after_free`: a forward wrote a freed slot before the allocator handed it out again."""

from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.finding_kind import ALLOCATOR, Blame, FindingKind, Page, Sentence, Wrong
from canary_core.kinds.links import TWO_OWNERS
from canary_core.kinds.write_slot import WRONG_WRITE_SLOT
from canary_core.records import Kind

WRITE_AFTER_FREE = Class(
    "write_after_free",
    "a slot that is written after it was freed",
    ("sglang#38319", "trtllm#14565", "OSCAR#4"),
    ("Look for a request that ended while one of its forwards was planned.",),
)


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    root, told = case.root, case.explanation
    had = case.had_it or (root.request is not None and root.request in (root.stored_request, root.freed_by))
    if had or case.had_it is None:
        yield Diagnosis(WRITE_AFTER_FREE, "likely" if had else "possible", (told,))
        return
    text = f"{case.reader} never had {case.slot}, as far as its history goes"
    yield Diagnosis(WRONG_WRITE_SLOT, "likely", (told, text))
    yield Diagnosis(WRITE_AFTER_FREE, "possible", (told, text))


KIND = FindingKind(
    kind=Kind.WRITE_AFTER_FREE,
    place=60,
    sentences=(
        Sentence(
            "{reader} wrote {position} to {where}, which {freer} freed{freed} and nobody was given since: write "
            "after free."
        ),
    ),
    brings=TWO_OWNERS,
    diagnose=_diagnose,
    classes=(WRITE_AFTER_FREE, WRONG_WRITE_SLOT),
    blame=Blame("slot events", "alloc is not told, or free is told too early"),
    page=Page(
        wrong=Wrong.ALLOCATOR,
        means="A forward wrote a slot that was freed and that nobody was given since.",
        causes="""
        A request was ended while one of its forwards was still planned. Or, where `request` never had the slot, its
        write went to a wrong address.
        """,
        next_steps="""
        `step_freed` says when it was freed. Look whether the forward was put together before that and issued after.
        """,
        remedies=(ALLOCATOR,),
    ),
)
