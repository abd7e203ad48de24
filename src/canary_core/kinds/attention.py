"""`attention`: a layer's attention computes something else than the model's configuration says."""

from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.finding_kind import Blame, FindingKind, Page, Remedy, Sentence, Wrong
from canary_core.kinds.links import Link
from canary_core.records import Kind

WRONG_KERNEL = Class(
    "wrong_attention",
    "attention that computes wrongly on every path, or is given a wrong scale, window or head",
    (),
    (
        "Change the attention backend: if the finding ends, its kernel or its arguments are at fault.",
        "Compare scale, window, cap and sinks that the backend is given with the model's configuration.",
    ),
)


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    yield Diagnosis(WRONG_KERNEL, "possible" if case.root.rule == "unknown" else "likely", (case.explanation,))


KIND = FindingKind(
    kind=Kind.ATTENTION,
    place=205,
    sentences=(
        Sentence(
            "attention of {layer} was given other keys or values than the layer has computed, for {reader} at "
            "{position}{different}.",
            when=lambda v: v.rule in ("keys", "values"),
        ),
        Sentence(
            "attention of {layer} is not what the model's configuration says, for {reader} from {position} "
            "on{different}.",
        ),
    ),
    brings={Kind.ATTENTION: {Link.STEP, Link.REQUEST, Link.LAYER}},
    diagnose=_diagnose,
    classes=(WRONG_KERNEL,),
    blame=Blame("hooks", "Recomputer.attention gives other rules than the model has"),
    page=Page(
        wrong=Wrong.RECOMPUTED,
        means="""
        While a request was computed a second time, one layer's attention was computed once more in plain torch and 32
        bits, from the very queries, keys and values, and it is another one than rounding explains. `detail` says in
        which head, by how much, and by which simple deviation the output is explained. See [verify.md](verify.md).

        | `rule` | the output is that of |
        |---|---|
        | `scale` | another factor of the logits |
        | `window` | another window, or none |
        | `soft_cap`, `sinks` | logits without the cap, or without the sink |
        | `head` | another head of the keys and values |
        | `values`, `keys` | values or keys that the layer has not computed, as where one is stored for the other |
        | `unknown` | none of these |
        """,
        causes="""
        A kernel that computes wrongly, or wrongly on one device. A backend that ignores the window, the cap or the
        sinks of a model. A scale that was taken from another field of the configuration.
        """,
        next_steps="""
        Verify again, until each layer had its turn. Change the attention backend; run on another device.
        """,
        remedies=(
            Remedy(
                "an attention backend that computes something else than the model's configuration says",
                "another attention backend; see [verify.md](verify.md)",
            ),
        ),
    ),
)
