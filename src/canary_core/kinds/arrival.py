"""`arrival`: bytes that came back without a forward differ from the bytes stored for the prefix."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import Blame, FindingKind, Page, Remedy, Sentence, Wrong, as_told
from canary_core.kinds.links import OWNERS, READ, Link
from canary_core.records import Kind

LOAD_BACK = Class(
    "load_back",
    "damage only in what was loaded back",
    ("sglang#36738", "sglang#35769", "sglang#31427", "LMCache#4385", "LMCache#4463"),
    (
        "Look at the fence between the load and the first read, and whether pages are released in between.",
        "If every load differs: does what moves the pages read the cache's shape and strides as the engine does?",
    ),
)

CONNECTOR = Remedy(
    "a connector or host tier that brings other KV than was stored", "turn it off; see [ledger.md](ledger.md)"
)

KIND = FindingKind(
    kind=Kind.ARRIVAL,
    place=130,
    sentences=(
        Sentence(
            "the bytes that came back are not those that were stored for this prefix: {origin} brought {place} for "
            "{reader}{different}."
        ),
    ),
    brings={Kind.ARRIVAL: {Link.STEP, *READ}, Kind.BYTES: OWNERS, Kind.NON_FINITE: OWNERS},
    diagnose=as_told(LOAD_BACK),
    classes=(LOAD_BACK,),
    blame=Blame(
        "slot events",
        "bytes that come back are others than were kept: ledger.keep, expect or arrive with the wrong slots or tokens",
    ),
    page=Page(
        wrong=Wrong.ARRIVAL,
        means="""
        Bytes came back without a forward, from host memory, a disk or another engine, and they are none of those that
        were stored for this prefix. `origin` brought them: the connector. `sources` are all that differ, `detail` says
        the same in short; where it is one, `source`, `layer` and `half` name it. One finding is of one block: `page`,
        `slot` and `position` are those of its first token. `stored_value` and `found_value` are of the first source
        that differs. See [ledger.md](ledger.md) for when such a difference is certain.
        """,
        causes="""
        All sources of a block differ: the connector brought another block, stored it before it was complete, or copied
        it while somebody wrote. Whole layers or one half differ: their copy was left out, came too late, or went to
        another layer. One source of one block differs: a flipped bit in host memory or on the way.
        """,
        next_steps="""
        Look whether all findings are of one request and one stretch of positions: that is one wrong load. Switch the
        connector off for a test: the finding must go. `request` has read these bytes, so its output is not to be
        trusted.
        """,
        remedies=(CONNECTOR,),
    ),
)
