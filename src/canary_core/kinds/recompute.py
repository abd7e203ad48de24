"""`recompute`: the cache holds other KV than the model computes from the request's tokens."""

from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.finding_kind import Blame, FindingKind, Page, Remedy, Sentence, Wrong
from canary_core.kinds.links import Link
from canary_core.records import Kind

OTHER_INPUT = Class(
    "other_input",
    "another embedding, or another position, than the request's own",
    (),
    ("Compare the positions given to the forward, and what stands in the place of tokens, at the finding's position.",),
)

BROUGHT_KV = Class(
    "brought_kv",
    "content of a hit, a fork or an arrival that something else has computed",
    (),
    (
        "Find who computed it: with which weights, which adapter, and from which embeddings.",
        "Must the prefix cache be emptied when these change, or its key have them?",
    ),
)

OTHER_ATTENTION = Class(
    "other_attention",
    "attention that was given something else, or computed something else, from one position on",
    (),
    (
        "Look at the length, the table and the window that attention was given from that position on.",
        "Change the attention backend, then switch graphs and speculation off: whatever makes it end is at fault.",
    ),
)

OTHER_HALF = Class(
    "other_half",
    "K or V alone of a layer that was computed, rotated or scaled otherwise, from the right input",
    (),
    (
        "Of K: compare the positions that the rotation was given, its base and its scaling, and a norm of K.",
        "Of either: look at the weights, the adapter and the shard of its projection, and at the scale of its store.",
    ),
)

OTHER_WEIGHTS = Class(
    "other_weights",
    "weights that are others than those the KV was computed with",
    (),
    ("Were weights or adapters loaded since the request began? Running requests and the prefix cache must go then.",),
)

CHANGED_WEIGHTS = Class(
    "changed_weights",
    "weights that were changed under KV computed with those from before",
    (),
    ("Running requests and the prefix cache must go where weights or adapters are loaded: does that call keep them?",),
)

OTHER_STATE = Class(
    "other_state",
    "a recurrent state that is another request's, was not cleared or rolled back, or was computed by other weights",
    (),
    (
        "Look at who had the row of states before, and whether it was cleared.",
        "Were rows of the batch reordered, or tokens taken back, and the states with them?",
    ),
)

_BY_RULE = {
    "state": OTHER_STATE,
    "input": OTHER_INPUT,
    "brought": BROUGHT_KV,
    "attention": OTHER_ATTENTION,
    "half": OTHER_HALF,
    "everywhere": OTHER_WEIGHTS,
    "weights": CHANGED_WEIGHTS,
}


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    what = _BY_RULE.get(case.root.rule or "")
    if what is not None:
        yield Diagnosis(what, "likely", (case.explanation,))


KIND = FindingKind(
    kind=Kind.RECOMPUTE,
    place=210,
    sentences=(
        Sentence(
            "a recurrent state of {reader} is not what the model computes from its tokens, in {layer}, while all KV up "
            "to there is{different}: it is another request's, was not cleared, or was computed wrongly.",
            when=lambda v: v.rule == "state",
        ),
        Sentence(
            "the KV of {reader} is not what the model computes from its tokens, from {position} on and in layer 0 "
            "already{different}: another embedding or another position was computed.",
            when=lambda v: v.rule == "input",
        ),
        Sentence(
            "the KV of {reader} is not what the model computes from its tokens, from {position} on, within what the "
            "request did not compute itself{different}: something else computed it.",
            when=lambda v: v.rule == "brought",
        ),
        Sentence(
            "the KV of {reader} is not what the model computes from its tokens, from {position} on and behind layer "
            "0{different}: attention was given something else there, or computed something else.",
            when=lambda v: v.rule == "attention",
        ),
        Sentence(
            "the KV of {reader} is not what the model computes from its tokens, from {position} on and in one of K and "
            "V alone{different}: that half of {layer} was projected, rotated or scaled otherwise, from a right input.",
            when=lambda v: v.rule == "half",
        ),
        Sentence(
            "the KV of {reader} is not what the model computes from its tokens, from {position} on{different}: it was "
            "computed with the weights from before.",
            when=lambda v: v.rule == "weights",
        ),
        Sentence(
            "the KV of {reader} is nowhere what the model computes from its tokens{different}: it was computed with "
            "other weights, or all of it wrongly.",
        ),
    ),
    brings={Kind.RECOMPUTE: {Link.STEP, Link.REQUEST, Link.LAYER}},
    diagnose=_diagnose,
    classes=(OTHER_INPUT, BROUGHT_KV, OTHER_ATTENTION, OTHER_HALF, OTHER_WEIGHTS, CHANGED_WEIGHTS, OTHER_STATE),
    blame=Blame("hooks", "Recomputer.compute computes something else than the engine, or cached names other slots"),
    page=Page(
        wrong=Wrong.RECOMPUTED,
        means="""
        Somebody asked for a request to be verified: the engine computed its KV a second time, from its tokens alone,
        and the cache holds something else. Its bytes may well be as they were written. `source`, `layer` and `half` are
        the first layer that differs, `position` and `slot` the first position there; `detail` says by how much, and
        what is the engine's own numerical noise. See [verify.md](verify.md).

        | `rule` | what is seen |
        |---|---|
        | `input` | layer 0 differs already, from some position on |
        | `brought` | the difference begins within what a hit, a fork, an arrival or a preemption brought |
        | `attention` | layer 0 is right, and others differ, from some position on |
        | `half` | K or V of the first layer that differs is right, the other one is not, from some position on |
        | `weights` | the weights were changed since the request began; `detail` says by what |
        | `everywhere` | all of it differs |
        | `state` | a recurrent state of `layer` differs, no KV up to there; `detail` has the position of KV behind |
        """,
        causes="""
        Weights or an adapter changed and the cache was kept. A position or an embedding was wrong. Attention was given
        a wrong length, table or window, or its kernel computes wrongly. Layers were skipped. A recurrent state was not
        cleared, or exchanged.
        """,
        next_steps="""
        Verify other requests: if all differ everywhere, look at the weights; if only those with a hit do, at what fills
        the prefix cache. Else switch CUDA graphs, speculation and the attention backend one by one.
        """,
        remedies=(
            Remedy(
                "weights that were changed under a kept cache, or a kernel that computes wrongly",
                "empty the prefix cache; another attention backend; see [verify.md](verify.md)",
            ),
        ),
    ),
)
