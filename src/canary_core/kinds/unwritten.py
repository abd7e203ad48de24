"""`unwritten`: a forward will read a slot never written by a forward."""

from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.facts import counted
from canary_core.kinds.finding_kind import ALLOCATOR, Blame, FindingKind, Page, Sentence, Wrong
from canary_core.kinds.links import OWNERS, READ
from canary_core.kinds.reads import STALE_TABLE
from canary_core.records import Kind, State

UNFILLED_PREFIX = Class(
    "unfilled_prefix",
    "a prefix that was published before it was filled",
    ("vllm#37152", "TGI#2489"),
    ("Look when the block went into the prefix cache, and when it was written.",),
)

UNWRITTEN = Class(
    "unwritten",
    "a slot that nobody has written",
    ("vllm#37152", "trtllm#15546", "vllm#42273"),
    ("Look at the table entry: was it ever filled? And at lost writes of earlier forwards.",),
)


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    root, right = case.root, case.right_slot
    told = [f"{case.slot} at {counted('position', root.position)} of {case.reader} holds nothing"]
    if right is not None and right != root.slot:
        told.append(f"what it should read is intact in slot {right}")
        yield Diagnosis(STALE_TABLE, "likely", tuple(told))
        return
    if root.stored_state is State.PARKED or case.was_cached or case.only_a_hit:
        told.append(
            "the prefix cache has it"
            if root.stored_state is State.PARKED
            else "a prefix hit brought it" + (": the request has written nothing yet" if case.only_a_hit else "")
        )
        yield Diagnosis(UNFILLED_PREFIX, "likely", tuple(told))
        return
    yield Diagnosis(UNWRITTEN, "likely", tuple(told))
    yield Diagnosis(UNFILLED_PREFIX, "possible", tuple(told))


KIND = FindingKind(
    kind=Kind.UNWRITTEN,
    place=150,
    sentences=(
        Sentence(
            "{reader} will read {position} from {where}, which the prefix cache keeps although nothing was written "
            "there since it was handed out or cleared{wrote}: a prefix was published before it was filled, or a "
            "write was lost.",
            when=lambda v: v.stored_state is State.PARKED,
        ),
        Sentence(
            "{reader} will read {position} from {where}, which was handed out again since {writer} wrote "
            "it{written}, and not written since: the slot was freed too early, a prefix was published before it was "
            "filled, or a write was lost.",
            when=lambda v: v.stored_state is State.ALLOCATED and v.step_written is not None,
        ),
        Sentence(
            "{reader} will read {position} from {where}, which was handed out and never written: a prefix was "
            "published before it was filled, or a write was lost.",
            when=lambda v: v.stored_state is State.ALLOCATED,
        ),
        Sentence(
            "{reader} will read {position} from {where}, which holds nothing since it was cleared or rolled "
            "back{wrote}: it was cleared too early, or the table still names it.",
            when=lambda v: v.step_written is not None,
        ),
        Sentence(
            "{reader} will read {position} from {where}, which no forward has written: a prefix was published before "
            "it was filled, a write was lost, or the table points elsewhere."
        ),
    ),
    brings={Kind.UNWRITTEN: READ, Kind.POSITION: READ, Kind.TOKEN: READ, Kind.PREFIX: READ, Kind.BYTES: OWNERS},
    diagnose=_diagnose,
    classes=(STALE_TABLE, UNFILLED_PREFIX, UNWRITTEN),
    blame=Blame(
        "BatchAdapter",
        "slots are read that no view said are written: prefix_lens, table, page_size, or forwards without a view; "
        "or events that clear too much",
    ),
    page=Page(
        wrong=Wrong.NOTHING,
        means="A forward is about to read a slot that no forward has written, or that was cleared since.",
        causes="""
        A prefix was published in the cache before it was filled. A write was lost. The table points to another slot. A
        transfer between engines was cut short.
        """,
        next_steps="""
        With `stored_request` somebody has written the slot, and it was cleared or handed out again since: look who gave
        it back while this request still names it. Without, look at what was to write `position` of this request. If the
        prefix came from the cache, look when the node was inserted.
        """,
        remedies=(ALLOCATOR,),
    ),
)
