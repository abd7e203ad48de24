"""`read_table`: the table given to attention names another slot than the engine's own table."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import OWNERS, Link
from canary_core.records import Kind, Phase, State

WRONG_TABLE_COPY = Class(
    "wrong_table_copy",
    "a table that attention was given and that is not the engine's own",
    ("trtllm#15546", "vllm#42273"),
    ("Look when the backend made this table, from what, and who has written to its buffer since.",),
)

KIND = FindingKind(
    kind=Kind.READ_TABLE,
    place=100,
    sentences=(
        Sentence(
            "{table} names no slot for {position} of {reader}, for which the engine keeps {kept}: attention was "
            "given a table that is stale or was made wrongly.",
            when=lambda v: v.slot is None or v.slot < 0,
        ),
        Sentence(
            "{table} names {where} for {position} of {reader}, for which the engine keeps {kept}; {writer} wrote "
            "{stored_position} to {where}{written}. Attention was given a table that is stale or was made wrongly.",
            when=lambda v: v.stored_state is State.WRITTEN and v.step_written is not None,
        ),
        Sentence(
            "{table} names {where} for {position} of {reader}, for which the engine keeps {kept}: attention was "
            "given a table that is stale or was made wrongly."
        ),
    ),
    brings={
        Kind.READ_TABLE: {Link.STEP, Link.REQUEST},
        Kind.SLOT_RANGE: {Link.REQUEST},
        Kind.NULL_SLOT: {Link.REQUEST},
        Kind.UNWRITTEN: {Link.REQUEST},
        Kind.FREED: {Link.REQUEST},
        Kind.POSITION: {Link.REQUEST},
        Kind.TOKEN: {Link.REQUEST},
        Kind.PREFIX: {Link.REQUEST},
        Kind.WRITE_SLOT: {Link.REQUEST},
        Kind.TWO_WRITERS: OWNERS,
        Kind.LOST_WRITE: {Link.REQUEST},
        Kind.BYTES: OWNERS,
    },
    diagnose=as_told(WRONG_TABLE_COPY),
    classes=(WRONG_TABLE_COPY,),
    blame=Blame(
        "BatchAdapter",
        "the table given to attention is compared with another one: rows, page_size or lengths of ReadTable",
    ),
    page=Page(
        wrong=Wrong.READ,
        means="""
        Attention was given a table that names another slot for a position than the one that the engine keeps for it.
        The engine's own table may be right, so nothing else need be wrong: the answer comes from another token's KV all
        the same. Every `CANARY_TABLE_INTERVAL` forwards one table is compared; see
        [how-it-works.md](how-it-works.md#the-tables-that-attention-is-given).
        """,
        causes="""
        A backend's own list or page table that is a step old, or was made from a wrong row or length; a buffer of a
        CUDA graph that another batch has overwritten; block ids that were lost on their way from the scheduler.
        """,
        next_steps="""
        `detail` is the table, `slot` what it names, and `stored_value` the slot that the engine keeps. The fields of
        the stored record say what `slot` holds. Look when this table was made, and from what.
        """,
        remedies=(TABLE,),
    ),
    numbers=tuple(Phase),
)
