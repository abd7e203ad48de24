"""`lost_write`: a forward should have written the slot, and its bytes are the same as before."""

from collections.abc import Iterator

from canary_core.kinds.case import Case
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.facts import ABSORBED, counted
from canary_core.kinds.finding_kind import KERNEL, Blame, FindingKind, Page, Sentence, Wrong
from canary_core.kinds.links import OWNERS, Link
from canary_core.kinds.non_finite import NON_FINITE
from canary_core.records import Kind

LOST_WRITE = Class(
    "lost_write",
    "a store that never ran, or went elsewhere, in all layers",
    ("vllm#43869", "sglang#32477", "vllm#47282"),
    ("Look at the slot list of that forward, and at findings of other slots in the same step.",),
)

LOST_WRITE_OF_A_LAYER = Class(
    "lost_write_of_a_layer",
    "a store of one layer or half that never ran, or went elsewhere",
    ("vllm#47282", "sglang#38031"),
    ("Look at this layer's store: its mask, its grid, a condition that skips it.",),
)


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    lost = case.of(Kind.LOST_WRITE)
    sources = sorted({v.source for v in lost if v.source})
    layers = {v.layer for v in lost}
    listed = ", ".join([*sources[:4], *(["..."] if len(sources) > 4 else [])])
    where = f" of {listed}" if listed else ""
    told = [f"{len({v.slot for v in lost})} slots{where} were not written at step {case.root.step}"]
    elsewhere = case.of(Kind.BYTES)
    if elsewhere:
        slot = counted("slot", elsewhere[0].slot)
        told.append(f"the bytes of {slot} changed at the same time: the store may have gone there")
    nothing_new = all(v.detail == ABSORBED for v in lost)
    sure = "possible" if nothing_new else "likely"
    if nothing_new:
        yield Diagnosis(NON_FINITE, "likely", (*told, f"there are {ABSORBED}"))
    # Layers that share fingerprints have one finding.
    names = {name for v in lost if v.source for name in v.sources or (v.source,)}
    everything = len(names) == case.sources if case.sources else max(len(names) - len(sources), len(layers) - 1) > 0
    yield Diagnosis(LOST_WRITE if everything else LOST_WRITE_OF_A_LAYER, sure, tuple(told))


KIND = FindingKind(
    kind=Kind.LOST_WRITE,
    place=140,
    sentences=(
        Sentence(
            "{reader} should have written {token} at {position} to {where}, whose bytes are what they were before: "
            "{detail}; or the store went elsewhere or never ran.",
            when=lambda v: v.detail == ABSORBED,
        ),
        Sentence(
            "{reader} should have written {token} at {position} to {where}, whose bytes are what they were before: "
            "the store went elsewhere or never ran."
        ),
    ),
    brings={
        Kind.LOST_WRITE: {Link.STEP, *OWNERS},
        Kind.UNWRITTEN: OWNERS,
        # The store went elsewhere: that slot's bytes are found a step later.
        Kind.BYTES: {Link.STEP, *OWNERS},
    },
    diagnose=_diagnose,
    classes=(LOST_WRITE, LOST_WRITE_OF_A_LAYER, NON_FINITE),
    blame=Blame(
        "PoolAdapter",
        "written slots did not change: the sources point elsewhere (slot dimension, page, copy), or write_slots do",
    ),
    page=Page(
        wrong=Wrong.WRITE,
        means="A forward should have written the slot, and its bytes are what they were before.",
        causes="""
        The store went to another place, or did not run. `bytes` findings elsewhere at the same time show where it went.
        """,
        next_steps="""
        Look at the store of this layer and half: its slot list, its mask, its grid. Two tokens with the very same
        embedding look like a lost write, too; the engine plugins dismiss those, also where tensor-parallel ranks have
        the rows. A request that has read damaged bytes may write the same numbers whatever the token, and so leave what
        an earlier one has left: NaN, infinity, or nothing but zeros. Such a finding joins the incident of the damage
        that its request has read, or, where the bytes hold NaN or infinity, the first incident of wrong numbers.

        **Where it is not seen.** The first write of a slot in memory that the engine has not cleared (`torch.empty`):
        KV of the same prompts may lie there from an engine before, so that unchanged bytes prove nothing. And hybrid
        models whose groups of layers take turns on the same memory (vLLM, Transformers' continuous batching): in a
        slot that another group had before, this group does not know what the bytes were. With `CANARY_STORE_CHECK` (in
        the profiles `hunt` and `ci`) it looks at them as they are handed out, and the write is told.
        """,
        remedies=(KERNEL,),
    ),
)
