"""`slot_range`: a table names a slot beyond the region."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import NO_SLOT, Link
from canary_core.records import Kind, Phase

BROKEN_TABLE = Class(
    "broken_table",
    "a table entry that is no slot",
    ("trtllm#15546", "vllm#42273"),
    ("Look who writes this row, and whether the request is as long as the batch says.",),
)

KIND = FindingKind(
    kind=Kind.SLOT_RANGE,
    place=110,
    sentences=(
        Sentence(
            "{reader} took or gave back {slot}, which is no slot of the pool: a list of the allocator or of the "
            "prefix cache is broken.",
            when=lambda v: v.phase is Phase.EVENT,
        ),
        Sentence(
            "{reader} writes {position}, for which the batch has no slot: the adapter's write_slots or table are "
            "shorter than the request.",
            when=lambda v: v.phase is Phase.POST_FORWARD and (v.slot is None or v.slot < 0),
        ),
        Sentence(
            "{reader} reads {position}, for which the table has no entry: it is narrower than the request is long, "
            "or the request's length is wrong.",
            when=lambda v: v.slot is None or v.slot < 0,
        ),
        Sentence(
            "{reader} writes {position} to {slot}, which is no slot of the pool: the slot list is stale or was never "
            "filled.",
            when=lambda v: v.phase is Phase.POST_FORWARD,
        ),
        Sentence(
            "{reader} reads {position} through table entry {v.slot}, which is no slot of the pool: a table row was "
            "overwritten, is stale, or was never filled."
        ),
    ),
    brings={Kind.SLOT_RANGE: {Link.STEP, Link.REQUEST}, **NO_SLOT, Kind.LOST_WRITE: {Link.REQUEST}},
    diagnose=as_told(BROKEN_TABLE),
    classes=(BROKEN_TABLE,),
    blame=Blame("BatchAdapter", "the table names slots that do not exist: page_size, rows or width of SlotTable"),
    page=Page(
        wrong=Wrong.READ,
        means="A forward is about to read a position through a table entry that is no slot of the pool.",
        causes="""
        A row of the table was overwritten, is stale, or was never filled. The batch says that the request is longer
        than it is.
        """,
        next_steps="""
        `slot` is the table's entry as it is. Look who writes this row of the table, and whether the length of `request`
        is right at this step.
        """,
        remedies=(TABLE,),
    ),
)
