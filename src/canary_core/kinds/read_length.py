"""`read_length`: a length given to attention is not the one that the forward's request has."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import Link
from canary_core.records import Kind, Phase

WRONG_LENGTH = Class(
    "wrong_length",
    "a length that attention was given and that is not the request's",
    ("imp#986", "vllm#53919", "vllm#55227"),
    ("Look when the backend made this length and from what: the forward before, another chunk, another row.",),
)


def _or_none(length: int | None) -> int:
    return -1 if length is None else length


KIND = FindingKind(
    kind=Kind.READ_LENGTH,
    place=95,
    sentences=(
        Sentence(
            "{table} has {v.found_value} tokens for {reader}, and {v.stored_value} are right ({off}): attention was "
            "given a length that is stale or was made wrongly.",
            when=lambda v: min(_or_none(v.found_value), _or_none(v.stored_value)) >= 0,
        ),
        Sentence(
            "{table} has another number of tokens for {reader} than the forward: attention was given a length that is "
            "stale or was made wrongly."
        ),
    ),
    brings={
        Kind.READ_LENGTH: {Link.STEP, Link.REQUEST},
        Kind.READ_TABLE: {Link.STEP, Link.REQUEST},
        Kind.TOKEN: {Link.REQUEST},
        Kind.POSITION: {Link.REQUEST},
        Kind.PREFIX: {Link.REQUEST},
        Kind.WRITE_INPUT: {Link.REQUEST},
        Kind.LOST_WRITE: {Link.REQUEST},
        Kind.NON_FINITE: {Link.REQUEST},
    },
    diagnose=as_told(WRONG_LENGTH),
    classes=(WRONG_LENGTH,),
    blame=Blame("BatchAdapter", "lens of ReadTable: given, begins or expected are not those of the rows compared"),
    page=Page(
        wrong=Wrong.READ,
        means="""
        Attention was given another length for a request than the request has: of the tokens it reads (a sequence
        length, a row of an `indptr`, the pieces of a cascade) or of the tokens it computes (the starts of the rows'
        queries). One too few and each new token is computed without the one before; the first chunk's length and a
        later chunk is computed without its context. Table, slots and bytes may all be right. Lengths are compared
        together with a table, every `CANARY_TABLE_INTERVAL` forwards; see
        [how-it-works.md](how-it-works.md#the-tables-that-attention-is-given).
        """,
        causes="""
        Metadata that is a step old; a length taken before the new tokens were added; a chunk that gets the length of
        the one before; a buffer of a CUDA graph that another batch has overwritten; rows without the common prefix.
        """,
        next_steps="""
        `detail` names the lengths, `found_value` is the one that attention was given for `request`, `stored_value` the
        right one. Told once for each request and difference. Look when this length was made, and from what.
        """,
        remedies=(TABLE,),
    ),
    numbers=tuple(Phase),
)
