"""`double_free`: a free or parked slot was given back again."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import ALLOCATOR, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import TWO_OWNERS
from canary_core.records import Kind, State

DOUBLE_FREE = Class(
    "double_free",
    "a slot that was released twice",
    ("sglang#38941", "vllm-ascend#14055"),
    ("Look for two ways in which the request ended, and for a reference count below zero.",),
)

KIND = FindingKind(
    kind=Kind.DOUBLE_FREE,
    place=20,
    sentences=(
        Sentence(
            "{where} was released by {reader} although no request has it: {freer} let go of it{freed}, and the "
            "prefix cache keeps it since: released twice.",
            when=lambda v: v.stored_state is State.PARKED and (v.step_freed is not None or v.freed_by is not None),
        ),
        Sentence(
            "{where} was released by {reader} although no request has it and the prefix cache keeps it: released "
            "twice, or listed twice in one call.",
            when=lambda v: v.stored_state is State.PARKED,
        ),
        Sentence(
            "{where} was freed by {reader} although it was free already: freed twice, or listed twice in one call.",
            when=lambda v: v.step_freed is None and v.freed_by is None,
        ),
        Sentence("{where} was freed by {reader} although it was free, since {freer} freed it{freed}: freed twice."),
    ),
    brings=TWO_OWNERS,
    diagnose=as_told(DOUBLE_FREE),
    classes=(DOUBLE_FREE,),
    blame=Blame(
        "slot events",
        "free, park or evict is told twice of a slot, free where park is meant, or share not at a prefix hit",
    ),
    page=Page(
        wrong=Wrong.ALLOCATOR,
        means="""
        A slot was given back that was free already, or parked: its last request had let go of it, and the prefix cache
        keeps it.
        """,
        causes="""
        A request that ends in two ways at the same time (finished and aborted). A prefix that both the request and the
        cache give back.
        """,
        next_steps="""
        `request` gave it back now; `freed_by` did before, at `step_freed`. With `stored_state` `parked` the prefix
        cache will hand out a slot, or share it, that is in the free list: look for a count of references that fell
        below zero.
        """,
        remedies=(ALLOCATOR,),
    ),
)
