"""`evicted_in_use`: the prefix cache gave up a slot of a running request."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import ALLOCATOR, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import TWO_OWNERS
from canary_core.records import Kind, State

EVICTED_IN_USE = Class(
    "evicted_in_use",
    "an eviction of what a request still has",
    ("sglang#27586", "sglang#34870", "ATOM#1417"),
    ("Look at the lock count of that prefix: when was it taken, and was it taken for all of it?",),
)

KIND = FindingKind(
    kind=Kind.EVICTED_IN_USE,
    place=30,
    sentences=(
        Sentence(
            "{where} was evicted from the prefix cache while a request has it: it was handed out and not released "
            "since. A lock was lost, or taken back too early.",
            when=lambda v: v.stored_state is State.ALLOCATED or v.step_written is None,
        ),
        Sentence(
            "{where} was evicted from the prefix cache while a request has it: it was handed out or shared and not "
            "released since. {writer} wrote it{written}. A lock was lost, or taken back too early."
        ),
    ),
    brings=TWO_OWNERS,
    diagnose=as_told(EVICTED_IN_USE),
    classes=(EVICTED_IN_USE,),
    blame=Blame("slot events", "evict is told of slots that were never parked: tell park before, or free"),
    page=Page(
        wrong=Wrong.ALLOCATOR,
        means="The prefix cache gave up a slot that a request still has.",
        causes="""
        A lock that is taken too late, released twice, or not taken for all of the prefix. An eviction that looks at an
        old count of references.
        """,
        next_steps="""
        `stored_request` wrote the slot; who shares it now is not recorded. If a request still reads it, a `freed`
        finding at the next forward names that one.
        """,
        remedies=(ALLOCATOR,),
    ),
)
