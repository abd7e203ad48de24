"""`token`: the slot holds another token than the request's own."""

from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.facts import counted
from canary_core.kinds.finding_kind import TABLE, Blame, FindingKind, Page, Sentence, Wrong
from canary_core.kinds.links import READ
from canary_core.kinds.reads import READ_WRONGLY, read_wrongly
from canary_core.records import Kind, Phase

ANSWER_LIST = Class(
    "answer_list",
    "a request's list of tokens that is not what was sampled",
    ("vllm#42043", "vllm#38624"),
    ("Look at what is appended when an output comes back: preempted and resumed requests, discarded tokens.",),
)


def diagnose(case: Case) -> Iterator[Diagnosis]:
    """Of a list of the host no slot is to blame."""
    root = case.root
    if root.phase is not Phase.EVENT:
        yield from read_wrongly(case)
        return
    told = f"from {counted('position', root.position)} on, the list of {case.reader} is not what the sampler gave"
    yield Diagnosis(ANSWER_LIST, "certain", (f"{told}, {root.detail}" if root.detail else told,))


KIND = FindingKind(
    kind=Kind.TOKEN,
    place=170,
    sentences=(
        Sentence(
            "the sampler gave {reader} {given_token} for {position}, but the request's own list has {own_token} "
            "there{different}: what is answered is not what the model goes on with.",
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
    diagnose=diagnose,
    classes=(*READ_WRONGLY, ANSWER_LIST),
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
        `token`: the engine's copy to the host, or the row to which it was appended, is wrong. `detail` says what it
        looks like: a token that was dropped, or came twice.

        With `phase` `post_forward` the sampler gave `token` for `position`, and the slot holds another token that was
        never sampled: a rejected draft was kept, or a sequence length is wrong. Look at the lengths after the last
        verification.
        """,
        remedies=(TABLE,),
    ),
    numbers=(Phase.POST_FORWARD,),
)
