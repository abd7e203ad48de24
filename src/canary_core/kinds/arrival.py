"""`arrival`: bytes that came back without a forward differ from the bytes stored for the prefix."""

from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.finding_kind import Blame, FindingKind, Page, Remedy, Sentence, Wrong
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

LOAD_UNDONE = Class(
    "load_undone",
    "a load that counts as done and brought nothing, or not all of it",
    ("dynamo#15079", "vllm#46951"),
    (
        "Look at how the connector learns that a load has ended, and at its errors: a failed one must be reported.",
        "If whole layers are left out: are they among those that the connector was given, draft layers too?",
    ),
)

ANOTHERS_KV = Class(
    "anothers_kv",
    "a tier or connector that gives back KV of another sequence or identity",
    ("LMCache#4385", "LMCache#4991", "dynamo#8419", "vllm#51637"),
    (
        "Look at the key under which it stores: all tokens so far, and whatever else KV depends on, must be in it.",
        "Are blocks filled, or stored, after they were given to somebody else?",
    ),
)

_BY_RULE = {
    "nothing_came": LOAD_UNDONE,
    "left_out": LOAD_UNDONE,
    "another_sequence": ANOTHERS_KV,
    "another_identity": ANOTHERS_KV,
}


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    what = _BY_RULE.get(case.root.rule or "")
    if what is None:
        yield Diagnosis(LOAD_BACK, "likely", (case.explanation,))
    else:
        yield Diagnosis(what, "certain", (case.explanation,))


CONNECTOR = Remedy(
    "a connector or host tier that brings other KV than was stored", "turn it off; see [ledger.md](ledger.md)"
)

KIND = FindingKind(
    kind=Kind.ARRIVAL,
    place=130,
    sentences=(
        Sentence(
            "nothing came: {origin} is said to have brought {place} for {reader}, and what lies there is what "
            "lay there before{different}.",
            when=lambda v: v.rule == "nothing_came",
        ),
        Sentence(
            "not all came: {origin} brought {place} for {reader} without some of its layers{different}.",
            when=lambda v: v.rule == "left_out",
        ),
        Sentence(
            "the KV of another sequence came: {origin} brought {place} for {reader}{different}.",
            when=lambda v: v.rule == "another_sequence",
        ),
        Sentence(
            "the KV of another identity came: {origin} brought {place} for {reader}{different}.",
            when=lambda v: v.rule == "another_identity",
        ),
        Sentence(
            "the bytes that came back are not those that were stored for this prefix: {origin} brought {place} for "
            "{reader}{different}."
        ),
    ),
    brings={Kind.ARRIVAL: {Link.STEP, *READ}, Kind.BYTES: OWNERS, Kind.NON_FINITE: OWNERS},
    diagnose=_diagnose,
    classes=(LOAD_BACK, LOAD_UNDONE, ANOTHERS_KV),
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

        With `rule` no more need be known of the origin than what it brought, so these are told of every connector and
        tier:

        | `rule` | what is certain |
        |---|---|
        | `nothing_came` | the bytes are those from before the load, of other tokens; `stored_request` left them there |
        | `left_out` | so are those of some layers or halves (`sources`), and others came |
        | `another_sequence` | this engine computed just these bytes for other tokens: from `stored_position` on, of `stored_request` |
        | `another_identity` | this engine computed just these bytes for the same tokens with `stored_identity`, and the request has `identity` |
        """,  # noqa: E501  (a row of a table)
        causes="""
        Nothing came: a load that failed counts as done, or its end was told before it was there. Not all came: draft
        layers, or the layers of another kind, are not among those that the tier keeps. Another sequence's, or another
        identity's: a key that lacks something; blocks filled or stored after they were given to somebody else.

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
