"""`double_alloc`: the allocator handed out a slot in use, or a parked one."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import ALLOCATOR, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import TWO_OWNERS
from canary_core.records import Kind, State

DOUBLE_ALLOCATION = Class(
    "double_allocation",
    "a slot that was handed out twice",
    ("sglang#38941", "local-inference-lab/vllm#480"),
    ("Look for a slot that is in the free list twice, or in the free list and in the prefix cache.",),
)

KIND = FindingKind(
    kind=Kind.DOUBLE_ALLOC,
    place=40,
    sentences=(
        Sentence(
            "{where} was handed out to {reader} while the prefix cache keeps it; {writer} wrote it{written}: handed "
            "out before it was evicted.",
            when=lambda v: v.stored_state is State.PARKED and v.step_written is not None,
        ),
        Sentence(
            "{where} was handed out to {reader} while the prefix cache keeps it: handed out before it was evicted.",
            when=lambda v: v.stored_state is State.PARKED,
        ),
        Sentence(
            "{where} was handed out to {reader}, but it was handed out before and neither freed nor written since: "
            "allocated twice, or a free was lost.",
            when=lambda v: v.stored_state is State.ALLOCATED,
        ),
        Sentence(
            "{where} was handed out to {reader} while {writer}, who wrote it{written}, still has it: allocated "
            "twice, or a free was lost."
        ),
    ),
    brings=TWO_OWNERS,
    diagnose=as_told(DOUBLE_ALLOCATION),
    classes=(DOUBLE_ALLOCATION,),
    blame=Blame("slot events", "alloc is told of slots in use, or their free or evict is not told"),
    page=Page(
        wrong=Wrong.ALLOCATOR,
        means="The allocator handed out a slot that is in use, or parked: the prefix cache did not evict it before.",
        causes="A slot was freed too early, twice, or never taken from the free list.",
        next_steps="""
        `request` got it now; `stored_request` still has it since `step_written`. Look for a `double_free` of the same
        slot before it. With `stored_state` `parked` no request has it: the block was taken out of the free list and
        stayed in the cache's index, so that a later hit would read what `request` writes.
        """,
        remedies=(ALLOCATOR,),
    ),
)
