"""`write_after_free`: a forward wrote a freed slot before the allocator handed it out again."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import ALLOCATOR, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import TWO_OWNERS
from canary_core.records import Kind

WRITE_AFTER_FREE = Class(
    "write_after_free",
    "a slot that is written after it was freed",
    ("sglang#38319", "trtllm#14565", "OSCAR#4"),
    ("Look for a request that ended while one of its forwards was planned.",),
)

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
    diagnose=as_told(WRITE_AFTER_FREE),
    classes=(WRITE_AFTER_FREE,),
    blame=Blame("slot events", "alloc is not told, or free is told too early"),
    page=Page(
        wrong=Wrong.ALLOCATOR,
        means="A forward wrote a slot that was freed and that nobody was given since.",
        causes="A request was ended while one of its forwards was still planned.",
        next_steps="""
        `step_freed` says when it was freed. Look whether the forward was put together before that and issued after.
        """,
        remedies=(ALLOCATOR,),
    ),
)
