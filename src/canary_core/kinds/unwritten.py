"""`unwritten`: a forward will read a slot never written by a forward."""

from collections import Counter
from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.double_alloc import DOUBLE_ALLOCATION
from canary_core.kinds.facts import counted, named
from canary_core.kinds.finding_kind import ALLOCATOR, Blame, FindingKind, Page, Sentence, Wrong
from canary_core.kinds.freed import USE_AFTER_FREE
from canary_core.kinds.links import OWNERS, READ
from canary_core.kinds.reads import STALE_TABLE, changed_hands
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


WRONG_LENGTH = Class(
    "wrong_length",
    "a length that counts tokens which the cache does not hold",
    ("transformers#48809", "transformers#48509", "vllm#49250"),
    (
        "Look where the request's length is set: after a reset, a roll-back, a load, a forward that was skipped.",
        "If the length is right, the forward that should have written these positions never ran.",
    ),
)


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    root, right = case.root, case.right_slot
    told = (f"{case.slot} at {counted('position', root.position)} of {case.reader} holds nothing", *_foreign(case))
    if right is not None and right != root.slot:
        yield Diagnosis(STALE_TABLE, "likely", (*told, f"what it should read is intact in slot {right}"))
        return
    if case.held_before is not None:
        yield from changed_hands(case, told)
        return
    own = root.request is not None and root.stored_request == root.request
    if own and root.stored_state is State.ALLOCATED and root.stored_position == root.position:
        text = f"{case.reader} wrote it at step {root.step_written}, and it was handed out again since"
        yield Diagnosis(USE_AFTER_FREE, "likely", (*told, text))
        return
    if case.cleared is not None:
        text = f"it was cleared at step {case.cleared} and not written since, and the request still counts it"
        yield Diagnosis(WRONG_LENGTH, "likely", (*told, text))
        return
    if root.stored_state is State.PARKED or case.was_cached:
        text = "the prefix cache has it" if root.stored_state is State.PARKED else "a prefix hit brought it"
        yield Diagnosis(UNFILLED_PREFIX, "likely", (*told, text))
        return
    yield from _nobody_knows(case, told)


def _foreign(case: Case) -> Iterator[str]:
    """Evidence of slots beside, which another request has written."""
    found = case.of(Kind.POSITION, Kind.TOKEN, Kind.PREFIX)
    foreign = Counter(v.stored_request for v in found if v.stored_request and v.stored_request != case.root.request)
    for writer, count in foreign.most_common(1):
        yield f"of the slots read beside it, {count} {'holds' if count == 1 else 'hold'} what {named(writer)} wrote"


def _nobody_knows(case: Case, told: tuple[str, ...]) -> Iterator[Diagnosis]:
    """Diagnoses of a slot whose past says nothing: neither cleared, nor cached, nor the reader's before."""
    root, owner, last = case.root, case.handed_to, case.reader_last
    if owner is not None and owner != case.reader:
        yield Diagnosis(STALE_TABLE, "likely", (*told, f"it was handed out to {owner}"))
        return
    if case.only_a_hit:
        text = "the request has written nothing yet, so it did not write this either"
        yield Diagnosis(UNFILLED_PREFIX, "possible", (*told, text))
        yield Diagnosis(UNWRITTEN, "possible", (*told, text))
        return
    if last is not None and root.position is not None and root.position > last >= 0:
        text = f"the last position that the request has written is {last}"
        yield Diagnosis(WRONG_LENGTH, "likely", (*told, text))
        yield Diagnosis(UNWRITTEN, "possible", (*told, text))
        return
    yield Diagnosis(UNWRITTEN, "likely", told)
    if last is None:
        yield Diagnosis(UNFILLED_PREFIX, "possible", told)


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
            "filled, a write was lost, or the table points elsewhere.",
            when=lambda v: v.stored_state is State.ALLOCATED and v.step_written is not None,
        ),
        Sentence(
            "{reader} will read {position} from {where}, which was handed out and never written: a prefix was "
            "published before it was filled, a write was lost, or the table points elsewhere.",
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
    classes=(STALE_TABLE, DOUBLE_ALLOCATION, USE_AFTER_FREE, WRONG_LENGTH, UNFILLED_PREFIX, UNWRITTEN),
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
