"""`freed`: a forward will read a freed slot, or a request shares one."""

from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.facts import named
from canary_core.kinds.finding_kind import ALLOCATOR, Blame, FindingKind, Page, Sentence, Wrong
from canary_core.kinds.links import OWNERS, TWO_OWNERS
from canary_core.records import Kind, Phase

USE_AFTER_FREE = Class(
    "use_after_free",
    "a slot that is read after it was freed",
    ("sglang#38319", "sglang#24193", "vllm#45357", "vllm-ascend#13501", "trtllm#12540"),
    ("Look who freed it, and why the request that reads it still names it: a retraction, an abort, a lost lock.",),
)


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    root = case.root
    who, when = named(root.freed_by) or "the engine", root.step_freed
    told = [f"{who} freed {case.slot}" + (f" at step {when}" if when else "")]
    if root.phase is Phase.EVENT:
        told.append(f"{case.reader} was given it by the prefix cache")
    else:
        told.append(
            f"{case.reader} reads it at step {root.step}"
            + (": the same request" if root.freed_by and root.freed_by == root.request else "")
        )
    told.append(f"{case.slots} slots of {case.pages} pages are concerned")
    yield Diagnosis(USE_AFTER_FREE, "likely", tuple(told))


KIND = FindingKind(
    kind=Kind.FREED,
    place=50,
    sentences=(
        Sentence(
            "{reader} was given {where} by the prefix cache, but {freer} freed it{freed}: a prefix hit on a freed "
            "slot.",
            when=lambda v: v.phase is Phase.EVENT,
        ),
        Sentence(
            "{reader} will read {position} from {where}, which was freed by {freer}{freed}{wrote}: use after free."
        ),
    ),
    brings={**TWO_OWNERS, Kind.NON_FINITE: OWNERS},
    diagnose=_diagnose,
    classes=(USE_AFTER_FREE,),
    blame=Blame("slot events", "slots are read after free or evict was told: tell park and share around a prefix hit"),
    page=Page(
        wrong=Wrong.NOTHING,
        means="""
        A forward is about to read a slot that was given back to the allocator. With `phase` `event`: a request was
        given such a slot by the prefix cache.
        """,
        causes="Use after free: the slot was freed while a request or a node of the cache still names it.",
        next_steps="""
        `freed_by` and `step_freed` say who gave it back and when. Without `freed_by` the engine did so by itself, for
        example when it evicted a prefix, or several requests gave slots back together. Then look at the lock count of
        that prefix. `stored_request` and `step_written` say whose KV it still holds.
        """,
        remedies=(ALLOCATOR,),
    ),
)
