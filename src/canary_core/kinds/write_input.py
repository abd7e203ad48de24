"""`write_input`: a forward was given another token or position than the request's own."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import Link
from canary_core.records import Kind, Phase

BATCH_INPUT = Class(
    "batch_input",
    "a batch that was put together wrongly",
    ("vllm#54498", "sglang#26329"),
    ("Look at rows that were exchanged, lengths that are off by one, and token lists of the step before.",),
)

KIND = FindingKind(
    kind=Kind.WRITE_INPUT,
    place=80,
    sentences=(
        Sentence(
            "the sampler gave {reader} {token} for {position}, but the forward computed {stored_token} there: the "
            "next tokens of two requests changed places, a rejected draft was kept, or a sequence length is wrong.",
            when=lambda v: v.stored_value is not None and v.stored_value >= 0,
        ),
        Sentence(
            "the forward computed {stored_token} at {stored_position} for {reader}, whose own token at {position} is "
            "{v.token}: the batch was assembled wrongly.",
            when=lambda v: v.token is not None and v.token >= 0,
        ),
        # At its own position only a token can be wrong, also where findings tell no tokens.
        Sentence(
            "the forward computed another token than the request's own at {position} for {reader}: the batch was "
            "assembled wrongly.",
            when=lambda v: v.position is not None and v.position == v.stored_position,
        ),
        Sentence(
            "the forward computed {given_token} at {stored_position} for {reader}, who is at {position}: the batch "
            "was assembled wrongly."
        ),
    ),
    brings={
        Kind.WRITE_INPUT: {Link.STEP, Link.REQUEST},
        Kind.TOKEN: {Link.REQUEST},
        Kind.POSITION: {Link.REQUEST},
        Kind.PREFIX: {Link.REQUEST},
        Kind.LOST_WRITE: {Link.REQUEST},
    },
    diagnose=as_told(BATCH_INPUT),
    classes=(BATCH_INPUT,),
    blame=Blame("BatchAdapter", "token_ids or positions contradict expected_tokens"),
    page=Page(
        wrong=Wrong.WRITE,
        means="The forward computed another token or position than the request has there.",
        causes="""
        The batch was put together wrongly: rows exchanged, lengths shifted by one, an old token list.

        With `stored_value` the finding is about the sampler: `token`, the same as `stored_value`, is what it gave
        `request` for `position`, and the forward computed `stored_token` there. Then the next tokens of two requests
        changed places on their way to the next forward, a rejected draft was kept, or a sequence length is one short
        after a verification.
        """,
        next_steps="""
        `stored_token` at `stored_position` is what the forward computed; `token` at `position` is what the request has.
        Look whose sampled token `stored_token` was: of another request, then rows were exchanged; of the same one for
        another position, then a length is wrong.
        """,
        remedies=(TABLE,),
    ),
    numbers=tuple(Phase),
)
