"""`write_slot`: a forward writes a token to another slot than the table names for reading."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import OWNERS, READ, Link
from canary_core.records import Kind, Phase

WRONG_WRITE_SLOT = Class(
    "wrong_write_slot",
    "a token stored where its request won't look for it",
    ("vllm#54498", "sglang#26329", "trtllm#15546"),
    ("Look which of slot list and table was changed after the other one was made.",),
)

KIND = FindingKind(
    kind=Kind.WRITE_SLOT,
    place=90,
    sentences=(
        Sentence(
            "{reader} writes {position} to {where}, but the table has no slot for it: the slot list and the table "
            "disagree.",
            when=lambda v: v.stored_value is None or v.stored_value < 0,
        ),
        Sentence(
            "{reader} writes {position} to {where}, but will read it from slot {v.stored_value}: the slot list and "
            "the table disagree."
        ),
    ),
    brings={
        Kind.WRITE_SLOT: {Link.STEP, Link.REQUEST},
        Kind.UNWRITTEN: READ,
        Kind.POSITION: READ,
        Kind.TOKEN: READ,
        Kind.PREFIX: READ,
        Kind.LOST_WRITE: READ,
        Kind.WRITE_AFTER_FREE: READ,
        Kind.BYTES: OWNERS,
    },
    diagnose=as_told(WRONG_WRITE_SLOT),
    classes=(WRONG_WRITE_SLOT,),
    blame=Blame("BatchAdapter", "write_slots contradict the table"),
    page=Page(
        wrong=Wrong.WRITE,
        means="A forward writes a token to another slot than the one from which it will be read.",
        causes="The list of slots to write and the table disagree.",
        next_steps="""
        `slot` is where it is written, `stored_value` is where the table says that it will be read. Look which of the
        two was changed after the other was made.
        """,
        remedies=(TABLE,),
    ),
    numbers=tuple(Phase),
)
