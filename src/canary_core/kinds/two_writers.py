"""`two_writers`: two tokens of one batch are written to the same slot."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import KERNEL, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import OWNERS, READ, Link
from canary_core.records import Kind, Phase

TWO_WRITERS = Class(
    "two_writers",
    "two tokens of one batch stored in one slot",
    ("sglang#38941", "vllm#43869"),
    ("Look at the allocation of both requests, and at padding that is given a real slot.",),
)

KIND = FindingKind(
    kind=Kind.TWO_WRITERS,
    place=70,
    sentences=(
        Sentence(
            "two tokens of one batch are written to {where}; {reader} ({position}) lost to {other_token} of the "
            "batch: the slot was handed out twice, or padding stores in a slot of the pool."
        ),
    ),
    brings={
        Kind.TWO_WRITERS: {Link.STEP, *OWNERS},
        Kind.POSITION: READ,
        Kind.TOKEN: READ,
        Kind.PREFIX: READ,
        Kind.LOST_WRITE: READ,
        Kind.BYTES: OWNERS,
        Kind.UNWRITTEN: READ,
        Kind.WRITE_SLOT: {Link.STEP, *READ},
    },
    diagnose=as_told(TWO_WRITERS),
    classes=(TWO_WRITERS,),
    blame=Blame("BatchAdapter", "two tokens of a batch have one slot: write_slots, table or padded rows"),
    page=Page(
        wrong=Wrong.WRITE,
        means="Two tokens of one batch are written to the same slot.",
        causes="""
        The slot was handed out twice. Rows of padding store in a slot of the pool, or live tokens in one that is for
        padding and that the plugin does not name as such.
        """,
        next_steps="""
        `request` at `position` lost; `stored_value` is the index, in the batch, of the token that won. Look at the
        allocation of both requests.
        """,
        remedies=(KERNEL,),
    ),
    numbers=tuple(Phase),
)
