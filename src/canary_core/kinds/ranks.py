"""`ranks`: tensor-parallel ranks that must compute the same have not."""

from collections.abc import Iterator

from canary_core.kinds.bytes import FLIPPED_BIT
from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.finding_kind import Blame, FindingKind, Page, Remedy, Sentence, Wrong
from canary_core.kinds.links import Link
from canary_core.records import Kind, Phase

DIVERGED_RANK = Class(
    "diverged_rank",
    "a rank that went its own way",
    (),
    (
        "Look at what each rank decides by itself: its sampler's random state, its scheduler's clocks, its buffers of "
        "tokens that were sampled.",
        "With one rank alone, and the same GPU again and again: its hardware.",
    ),
)


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    told = (case.explanation,)
    if case.root.rule == "kv":
        yield Diagnosis(FLIPPED_BIT, "possible", told)
        yield Diagnosis(DIVERGED_RANK, "possible", told)
    else:
        yield Diagnosis(DIVERGED_RANK, "likely", told)


KIND = FindingKind(
    kind=Kind.RANKS,
    place=6,
    sentences=(
        Sentence(
            "{ranks}. Which of them is right can't be told. The shards of an answer must be of one batch, so every "
            "answer of that batch may be wrong.",
            when=lambda v: v.odd_rank is None,
        ),
        Sentence("{ranks}. The shards of an answer must be of one batch, so every answer of that batch may be wrong."),
    ),
    brings={Kind.RANKS: {Link.STEP}},
    diagnose=_diagnose,
    classes=(DIVERGED_RANK, FLIPPED_BIT),
    blame=Blame("hooks", "ranks are grouped that do not compute the same batches (RankGroup), or numbered differently"),
    numbers=frozenset({Phase.POST_FORWARD}),
    page=Page(
        wrong=Wrong.RANKS,
        means="""
        Tensor-parallel ranks of one engine must be given the same batch, and sample the same tokens; of KV heads fewer
        than ranks, and of MLA latents, several ranks hold the same bytes. Every `CANARY_RANKS_INTERVAL`-th forward
        each rank adds up what it computed, and one of them compares the sums, on one machine. `rule` says what differs:

        | `rule` | what differs |
        |---|---|
        | `lengths` | how many tokens requests have in the cache, and how many are new |
        | `positions` | positions of new tokens |
        | `tokens` | token ids that the forward was given |
        | `slots` | slots that new tokens were written to, where one scheduler hands them out to all |
        | `history` | tokens that running requests had computed in a forward before, which was not compared |
        | `sampled` | tokens that were sampled |
        | `kv` | KV that several ranks hold, in `source`; if bit-equal before, in such forwards, under the same keys |

        Not compared: KV of heads that one rank alone has, SGLang's slots, drafted tokens, and ranks of other machines.

        `detail` names the ranks, each with host, GPU and process; `odd_rank` is the one that alone differs from at
        least two others. Of two ranks nobody can say which is wrong. `found_value` is the engine's number of the
        forward, `step` that of the rank that tells. It is one finding until the ranks agree again.
        """,
        causes="""
        A rank whose sampler, scheduler or buffer of sampled tokens went another way: each rank feeds itself the tokens
        that it sampled. A race in one rank's input buffers. For `kv` alone: a flipped bit, or a store, of one GPU.
        """,
        next_steps="""
        `tokens` or `history` after `sampled`: look at the sampler (its random state, grammar masks, logits that were
        not gathered). The same `odd_rank` again and again: take its GPU out of service and test it.
        """,
        remedies=(
            Remedy("one GPU's hardware, where `odd_rank` is the same each time", "take that GPU out of service"),
            Remedy(
                "a rank that schedules or samples by itself",
                "restart the engine, which puts all ranks at one place again; report it",
            ),
        ),
    ),
)
