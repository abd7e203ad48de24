"""`token`: the slot holds another token than the request's own."""

from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong
from canary_core.kinds.links import READ
from canary_core.kinds.reads import READ_WRONGLY, read_wrongly
from canary_core.records import Kind, Phase

KIND = FindingKind(
    kind=Kind.TOKEN,
    place=170,
    sentences=(
        Sentence(
            "the sampler gave {reader} {given_token} for {position}, but the request's own list has {own_token} there: "
            "what is answered is not what the model goes on with.",
            when=lambda v: v.phase is Phase.EVENT,
        ),
        Sentence(
            "the sampler gave {reader} {token} for {position}, but {where}, from which it was read, holds "
            "{stored_token} that {writer} wrote{written}: a rejected draft was kept, or a sequence length is wrong.",
            when=lambda v: v.phase is Phase.POST_FORWARD,
        ),
        Sentence(
            "{reader} expects {token} at {position}, {where} holds {stored_token} written by {writer}{written}: "
            "another request's prefix or image, or a rejected draft left behind."
        ),
    ),
    brings={Kind.TOKEN: READ, Kind.PREFIX: READ},
    diagnose=read_wrongly,
    classes=READ_WRONGLY,
    blame=Blame("BatchAdapter", "tokens differ from the requests' own: token_ids, prefix_lens or expected_tokens"),
    page=Page(
        wrong=Wrong.READ,
        means="The slot holds another token than the request has at this position.",
        causes="""
        A prefix of another request was reused, or of the same text with another image: in SGLang the tokens of an image
        are numbers made of its hash. A rejected draft of speculative decoding was left in the cache.
        """,
        next_steps="""
        Compare `token` with `stored_token`. If `stored_request` is another request, look at the match in the prefix
        cache. If it is the same one, look at the roll-back after the last verification.

        With `phase` `event` the sampler gave `stored_token`, and the request's own list, which its client gets, has
        `token`: the engine's copy to the host, or the row to which it was appended, is wrong.

        With `phase` `post_forward` the sampler gave `token` for `position`, and the slot holds another token that was
        never sampled: a rejected draft was kept, or a sequence length is wrong. Look at the lengths after the last
        verification.
        """,
        remedies=(TABLE,),
    ),
    numbers=(Phase.POST_FORWARD,),
)
