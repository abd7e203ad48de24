"""`prefix`: the slot's prefix is not the prefix of the slot before: the slot belongs to another sequence."""

from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.facts import CONTENT, ENCODED, WEIGHTS, Facts, counted
from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong
from canary_core.kinds.links import READ
from canary_core.kinds.reads import READ_WRONGLY, read_wrongly
from canary_core.records import Kind

OTHER_INPUT = Class(
    "other_input",
    "cross-attention over K and V of another input",
    ("transformers#31166",),
    (
        "Look whether the cross-attention half of the cache was reset, and whether its layers count as filled since.",
        "In a paged engine, look who wrote the request's row of that group's block table.",
    ),
)


def _of_an_encoder(v: Facts) -> bool:
    return bool(v.identity and v.stored_identity and v.stored_identity.startswith(ENCODED))


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    root = case.root
    if not _of_an_encoder(root):
        yield from read_wrongly(case)
        return
    here = f"{case.slot} at {counted('position', root.position)} of {case.reader}"
    yield Diagnosis(OTHER_INPUT, "certain", (f"{here} was computed of {root.stored_identity}, not of those given",))


KIND = FindingKind(
    kind=Kind.PREFIX,
    place=180,
    sentences=(
        Sentence(
            "{reader} will read {position} from {where}, which {writer} computed{written} with {stored_identity}; "
            "{reader} began with {identity}. A prefix hit across a change of the weights: the prefix cache was kept.",
            when=lambda v: bool(v.identity and v.identity.startswith(WEIGHTS) and v.stored_identity),
        ),
        Sentence(
            "{reader} has {identity}, but will read {position} from {where}, which {writer} computed{written} of "
            "{stored_identity}: cross-attention reads K and V of another input.",
            when=_of_an_encoder,
        ),
        Sentence(
            "{reader} has {identity}, but will read {position} from {where}, which {writer} computed{written} of "
            "{stored_identity}. A prefix hit across contents: the key of the prefix cache lacks what tells them apart.",
            when=lambda v: bool(v.identity and v.identity.startswith(CONTENT) and v.stored_identity),
        ),
        Sentence(
            "{reader} will read {position} from {where}, which {writer} computed{written} for another identity: "
            "{stored_identity}; {reader} has {identity}. A prefix hit across identities: the key of the prefix cache "
            "lacks what tells them apart.",
            when=lambda v: bool(v.identity),
        ),
        Sentence(
            "{reader} will read {position} from {where}, whose prefix is not the one before it: it belongs to a "
            "sequence that {writer} wrote{written}."
        ),
    ),
    brings={Kind.PREFIX: READ},
    diagnose=_diagnose,
    classes=(*READ_WRONGLY, OTHER_INPUT),
    blame=Blame("BatchAdapter", "prefixes do not continue: prefix_lens, writers, or a fork whose copy is not told"),
    page=Page(
        wrong=Wrong.READ,
        means="""
        The slot, or the whole row, belongs to another sequence: its prefix hash does not continue the hash of the slot
        before it.
        """,
        causes="A stale page table. A wrong match of a prefix. A page that two requests got.",
        next_steps="""
        Token and position of the slot may be right; what came before it is not. `stored_request` is the sequence that
        it belongs to. For a recurrent state it means that the state is not the one of this prefix.

        With `identity` the tokens are right, and were computed for something else: with other weights, another LoRA
        adapter, cache salt or extra key (`stored_identity`). One finding is told for each such hit, at position 0. Look
        at the key of the prefix cache: what tells the two apart is not in it. Adapters are told by their name or id. Of
        salts and keys, which may be secrets, a digest is told: the same one is the same text.

        With other weights, look whether the cache was emptied when they were changed (`the weights of change 2` are
        those after the second change). Requests that run while weights change go on with what they have: that is the
        engine's policy, and no finding.

        With content (`at positions 3 to 12 embeddings #0a1b2c3d`) the two have different embeddings, images or audio
        in the place of the same placeholder tokens, or one of them has tokens there. One finding is told for each such
        slot. Look whether the key of the prefix cache, or of the tier, has a hash of the content, and whether KV of
        such requests is inserted under its tokens alone. With the states of an encoder there is no prefix cache: look
        whether the cross-attention half was reset between two inputs, or at the block table of its group.
        """,
        remedies=(TABLE,),
    ),
)
