"""`null_slot`: a live token is read from, or written to, the null (padding) slot."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import NO_SLOT, Link
from canary_core.records import Kind, Phase

PADDING = Class(
    "padding",
    "padding in a live row, or a window entry evicted too early",
    ("vllm#43869", "sglang#27586", "sglang#8649", "sglang#30339"),
    ("Look how the batch is padded; in a window, compare the position with the window's end.",),
)

KIND = FindingKind(
    kind=Kind.NULL_SLOT,
    place=120,
    sentences=(
        Sentence(
            "{reader} took or gave back {null}, which is for padding only: a list of the allocator or of the prefix "
            "cache is broken.",
            when=lambda v: v.phase is Phase.EVENT,
        ),
        Sentence(
            "{reader} writes {position} to {null}, where it is lost: padding leaked into a live row.",
            when=lambda v: v.phase is Phase.POST_FORWARD,
        ),
        Sentence(
            "{reader} uses {null} for {position}: padding leaked into a live row, its row of the table is another "
            "request's, or was not filled so far, or a window entry was evicted while still readable."
        ),
    ),
    brings={**NO_SLOT, Kind.NON_FINITE: {Link.STEP, Link.REQUEST}},
    diagnose=as_told(PADDING),
    classes=(PADDING,),
    blame=Blame("BatchAdapter", "live tokens at the null slot: null_slot, lengths or rows of padding"),
    page=Page(
        wrong=Wrong.READ,
        means="A forward reads or writes the padding slot for a live token.",
        causes="""
        Padding of the batch got into a row that is in use. The row of the table is another request's, which ends
        earlier, or was not filled so far. Or an entry of a sliding window was evicted while it can still be read.
        """,
        next_steps="""
        If the region is a window, compare `position` with the end of the window: the eviction is too early. Else look
        at how the batch is padded.
        """,
        remedies=(TABLE,),
    ),
)
