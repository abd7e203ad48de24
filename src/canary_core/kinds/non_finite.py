"""`non_finite`: a float KV value just written, or a float in the null slot, is NaN or infinite."""

from canary_core.kinds.classes import Class
from canary_core.kinds.finding_kind import KERNEL, Blame, FindingKind, Page, Sentence, Wrong, as_told
from canary_core.kinds.links import READ, Link
from canary_core.records import Kind, Phase

NON_FINITE = Class(
    "non_finite",
    "numbers that are NaN or infinite when they are written",
    ("vllm#57156", "sglang#35351", "trtllm#2699"),
    ("Look at the first layer that has it: an overflow, or poisoned padding that got into a live row.",),
)

KIND = FindingKind(
    kind=Kind.NON_FINITE,
    place=200,
    sentences=(
        Sentence(
            "NaN or infinite values got into {null}, where padding is written: a padded row computed them, or a "
            "write went astray. Attention that reads padding under a mask can spread them to live requests.",
            when=lambda v: v.phase is Phase.POST_FORWARD and (v.position is None or v.position < 0),
        ),
        Sentence("{reader} wrote a NaN or infinite value at {position} to {where}: numerics, or poisoned padding."),
    ),
    brings={Kind.NON_FINITE: {Link.STEP, *READ}},
    diagnose=as_told(NON_FINITE),
    classes=(NON_FINITE,),
    blame=Blame("PoolAdapter", "written values are no finite numbers: dtype or strides of a source"),
    page=Page(
        wrong=Wrong.WRITE,
        means="""
        A value of float KV that was just written is NaN or infinite. Or, without a `position`: such a value got into
        the null slot, where the tokens of padded rows go. After each forward one null slot is looked at in all sources.
        What was in it when Canary looked first is not told, only counted as `unsure`; nor is what null slots hold that
        the engine only writes (`Region.null_reads`), or those of states, rings and compressed pools.
        """,
        causes="""
        Numerics, such as an overflow in a low precision. Padding that was poisoned and got into a live row. Padded rows
        that compute with memory that nobody has filled. In the null slot itself NaN does no harm until a kernel reads
        it under a mask: zero times NaN is NaN.
        """,
        next_steps="""
        The first layer that has it is where it starts. `CANARY_NON_FINITE=false` switches this check off for a model in
        which that is expected.
        """,
        remedies=(KERNEL,),
    ),
)
