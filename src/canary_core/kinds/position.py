"""`position`: the slot holds another position than the position read from it."""

from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong
from canary_core.kinds.links import READ
from canary_core.kinds.reads import READ_WRONGLY, read_wrongly
from canary_core.records import Kind

KIND = FindingKind(
    kind=Kind.POSITION,
    place=160,
    sentences=(
        Sentence(
            "{reader} will read {position} from {where}, but what was copied or loaded there is {stored_position} of "
            "{writer}: wrong slot mapping, a copy to the wrong slot, or a prefix match that is out of date.",
            when=lambda v: bool(v.arrived),
        ),
        Sentence(
            "{reader} will read {position} from {where}, but {writer} wrote {stored_position} there{written}: wrong "
            "slot mapping, a prefix match that is out of date, or the slot was handed out twice."
        ),
    ),
    brings={Kind.POSITION: READ, Kind.TOKEN: READ, Kind.PREFIX: READ},
    diagnose=read_wrongly,
    classes=READ_WRONGLY,
    blame=Blame("BatchAdapter", "slots hold other positions than the table says: table, page_size or prefix_lens"),
    page=Page(
        wrong=Wrong.READ,
        means="The slot holds another position than the one at which it is about to be read.",
        causes="""
        A wrong slot mapping. A slot that was handed out twice. A stale page table. A match in the prefix cache that is
        out of date: its slots were given to others since.
        """,
        next_steps="""
        `stored_request` wrote position `stored_position` there at `step_written`. If that is another request, look at
        the allocator, or, if `request` has just begun, at the match in the prefix cache. If it is the same one, look at
        how its table was filled.
        """,
        remedies=(TABLE,),
    ),
)
