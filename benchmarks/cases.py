"""The registry: what is measured, in which shapes, against which bar. Every op of `Backend` is in at least one case."""

from dataclasses import dataclass, replace

from benchmarks.layouts import LAYOUTS

STEP = ("check", "read_check", "note_store", "fingerprint", "compare_stores", "record", "scrub")
"""Ops in the order of a step."""
TOGETHER = "fingerprint_record"
"""The op in the place of `fingerprint` and `record` where nothing comes between."""
FINGERPRINTS = ("fingerprint", TOGETHER)
STORES = ("note_store", "compare_stores")
"""Those of them that run with ``CANARY_STORE_CHECK`` only."""
EVENTS = ("free", "alloc")
"""Ops of the allocator's events: on the slots that a batch reads."""
CACHE_EVENTS = ("park", "share", "park", "evict", "alloc")
"""Ops of the prefix cache's events, in an order that is clean on slots in use, and leaves them so."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``sets`` batches over disjoint slots, each of ``rows`` requests with ``context_tokens`` in the cache and
    ``new_tokens`` to write; the timed launches go round the sets, so that none finds its input in the cache.
    ``shared_tokens``: the first tokens of the context, whole pages, have the same slots in all rows of a set."""

    rows: int
    context_tokens: int
    new_tokens: int = 1
    sets: int = 1
    layers: int = 1
    spare_slots: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """What issue 3 asks for: at most so many µs, or at least so many GB/s."""

    at_most_us: float | None = None
    at_least_gbps: float | None = None

    def __str__(self) -> str:
        return f"≤ {self.at_most_us:g} µs" if self.at_most_us else f"≥ {(self.at_least_gbps or 0) / 1000:g} TB/s"

    def met(self, us: float, gbps: float) -> bool:
        """Whether a measurement reaches it."""
        return us <= self.at_most_us if self.at_most_us else gbps >= (self.at_least_gbps or 0)


@dataclass(frozen=True, slots=True)
class Case:
    """``ops`` are timed together, in order. ``peer``: which of the built-in's launches do the same work (``plan``,
    ``verify``, ``write``). ``scrub_bytes``: bytes of one scrub. ``tokens``: the batch says the requests' own tokens.
    ``quick``: part of ``--quick``."""

    name: str
    work: str
    ops: tuple[str, ...]
    shape: Shape
    layout: str = "bare"
    bar: Bar | None = None
    peer: tuple[str, ...] = ()
    scrub_bytes: int = 0
    tokens: bool = False
    quick: bool = False

    @property
    def has_bytes(self) -> bool:
        """Whether the case fingerprints bytes."""
        return not self.layout.startswith("bare")

    @property
    def step(self) -> tuple[str, ...]:
        """The ops of a step up to the last timed one that make sense for the case: what equality runs."""
        if not set(self.ops) & {*STEP, TOGETHER}:
            return self.ops
        last = max(STEP.index("record" if op == TOGETHER else op) for op in self.ops)
        steps = [op for op in STEP[: last + 1] if op in self.ops or op not in STORES]
        if TOGETHER in self.ops:
            steps = [TOGETHER if op == "fingerprint" else op for op in steps if op != "record"]
        bytes_only = ("read_check", *FINGERPRINTS, "scrub")
        return tuple(op for op in steps if self.has_bytes or op not in bytes_only)

    def tiny(self) -> "Case":
        """The same case small enough for the interpreter: logic only, never timed."""
        page = LAYOUTS[self.layout].page_size
        small = replace(
            self.shape,
            rows=min(self.shape.rows, 3),
            context_tokens=min(self.shape.context_tokens, max(37, page + 5)),
            new_tokens=min(self.shape.new_tokens, 21),
            sets=min(self.shape.sets, 2),
            layers=min(self.shape.layers, 2),
            spare_slots=min(self.shape.spare_slots, 50),
            shared_tokens=min(self.shape.shared_tokens, 32),
        )
        return replace(self, shape=small, scrub_bytes=min(self.scrub_bytes, 1 << 17))


MIB = 1 << 20

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "check/256x4096", "pre-forward check of 256 requests × 4096 tokens, planning included", ("check",),
            Shape(256, 4096), bar=Bar(25), peer=("plan", "verify"), quick=True,
        ),
        Case(
            "check/256x4096-of-4M", "the same, the slots spread over a pool of four times as many", ("check",),
            Shape(256, 4096, sets=4), peer=("plan", "verify"),
        ),
        Case(
            "check/1x131072", "pre-forward check of 1 request × 131,072 tokens, planning included", ("check",),
            Shape(1, 131072, sets=24), bar=Bar(15), peer=("plan", "verify"), quick=True,
        ),
        Case(
            "check/tokens-256x4096", "check of 256 × 4096 with the requests' own tokens", ("check",),
            Shape(256, 4096, sets=4), peer=("plan", "verify"), tokens=True,
        ),
        *(
            Case(
                f"check/readers-{rows}x131072", f"check of {rows} readers of a prefix of 131,072 tokens, and 128 each",
                ("check",), Shape(rows, 131_200, shared_tokens=131_072),
            )
            for rows in (1, 16, 256)
        ),
        Case(
            "check/readers-256x131072-pages", "the same 256 readers through a block table with pages of 16", ("check",),
            Shape(256, 131_200, shared_tokens=131_072), layout="bare-pages",
        ),
        Case(
            "check/readers-32x1048576", "check of 32 readers of a prefix of 1M tokens, and 128 each", ("check",),
            Shape(32, 1_048_704, shared_tokens=1_048_576),
        ),
        Case(
            "check/16x131072", "check of 16 requests × 131,072 tokens that share nothing", ("check",),
            Shape(16, 131_072),
        ),
        Case(
            "record/prefill-8192", "record a prefill of 8192 tokens, no bytes", ("record",),
            Shape(1, 0, 8192, sets=16), bar=Bar(20), peer=("write",), quick=True,
        ),
        Case(
            "record/decode-256", "record a decode of 256, no bytes", ("record",), Shape(256, 7, sets=16),
            peer=("write",),
        ),
        Case(
            "record/prefill-8192-bytes", "record a prefill of 8192 with the bytes of 32 layers × K+V × 2048 B",
            ("fingerprint", "record"), Shape(1, 0, 8192, sets=4, layers=32), layout="llama",
            bar=Bar(350), peer=("write",), quick=True,
        ),
        Case(
            "record/decode-256-bytes", "record a decode of 256 with the bytes of 32 layers × K+V × 2048 B",
            ("fingerprint", "record"), Shape(256, 7, sets=16, layers=32), layout="llama", bar=Bar(25), peer=("write",),
            quick=True,
        ),
        Case(
            "fingerprint_record/decode-256", "the same in one launch, as a step does it", (TOGETHER,),
            Shape(256, 7, sets=16, layers=32), layout="llama", bar=Bar(25), quick=True,
        ),
        Case(
            "fingerprint_record/decode-64", "one launch for a decode of 64", (TOGETHER,),
            Shape(64, 7, sets=64, layers=32), layout="llama",
        ),
        Case(
            "fingerprint/prefill-8192", "fingerprint alone: 8192 new slots × 32 layers × K+V × 2048 B",
            ("fingerprint",), Shape(1, 0, 8192, sets=4, layers=32), layout="llama",
        ),
        Case(
            "stores/prefill-8192", "what 32 layers have stored of 8192 new slots, fingerprinted and compared",
            STORES, Shape(1, 0, 8192, sets=4, layers=32), layout="llama",
        ),
        Case(
            "read_check/rows-2048", "verify bytes of 256 × 4096 slots × 2048 B, one source", ("read_check",),
            Shape(256, 4096), layout="llama-k", bar=Bar(at_least_gbps=4000), peer=("verify",), quick=True,
        ),
        Case(
            "read_check/mla-1152", "verify bytes of MLA rows, 1152 B", ("read_check",), Shape(256, 4096), layout="mla",
            bar=Bar(at_least_gbps=3600), peer=("verify",),
        ),
        Case(
            "read_check/dsv4-584", "verify bytes of DeepSeek-V4 packed pages, 576 + 8 B", ("read_check",),
            Shape(256, 4096), layout="dsv4", bar=Bar(at_least_gbps=3600), quick=True,
        ),
        Case(
            "read_check/fp8-1024", "verify bytes of FP8 rows, 1024 B", ("read_check",), Shape(256, 4096),
            layout="fp8-k", bar=Bar(at_least_gbps=3600), peer=("verify",),
        ),
        Case(
            "read_check/heads-first", "verify bytes of heads-first pages [8, 64, 128] bfloat16", ("read_check",),
            Shape(256, 4096), layout="heads-first", bar=Bar(at_least_gbps=3600), quick=True,
        ),
        Case(
            "read_check/shard-256", "verify bytes of a rank of 8: 16 layers × K+V × 256 B, which share fingerprints",
            ("read_check",), Shape(64, 4096, layers=16, spare_slots=1024), layout="shard",
            bar=Bar(at_least_gbps=3600), quick=True,
        ),
        Case(
            "read_check/shard-128", "the same of float8, 128 B", ("read_check",),
            Shape(64, 4096, layers=16, spare_slots=1024), layout="fp8-shard", bar=Bar(at_least_gbps=3600),
        ),
        Case(
            "scrub/shard-256", "scrub 64 MiB of 80 layers × K+V × 256 B, which share fingerprints", ("scrub",),
            Shape(1, 8192, sets=8, layers=80), layout="shard", scrub_bytes=64 * MIB,
        ),
        Case(
            "fingerprint/shard-256-prefill-8192", "8192 new slots × 80 layers × K+V × 256 B, which share fingerprints",
            ("fingerprint",), Shape(1, 0, 8192, sets=8, layers=80), layout="shard",
        ),
        Case(
            "fingerprint_record/shard-256-decode-256", "one launch for a decode of 256, of such layers", (TOGETHER,),
            Shape(256, 63, sets=16, layers=80), layout="shard",
        ),
        *(
            Case(
                f"scrub/{mib}MiB", f"scrub {mib} MiB of 32 layers × K+V × 2048 B", ("scrub",),
                Shape(1, 32768 // sets, sets=sets, layers=32), layout="llama", scrub_bytes=mib * MIB, quick=mib == 64,
            )
            for mib, sets in ((1, 128), (8, 32), (64, 8), (512, 4))
        ),
        Case(
            "verify/8192", "compare 8192 slots that just arrived, 32 layers × K+V × 2048 B", ("verify",),
            Shape(2, 4096, sets=4, layers=32), layout="llama",
        ),
        Case(
            "repair/16", "look for a flipped word in 16 parked slots of 2048 B, with the making of rows", ("repair",),
            Shape(2, 4096, sets=4, layers=32), layout="llama",
        ),
        Case(
            "adopt/8192", "fingerprint 8192 slots that arrived without records, 32 layers × K+V × 2048 B", ("adopt",),
            Shape(2, 4096, sets=4, layers=32), layout="llama",
        ),
        Case(
            "gather_blocks/8192", "what is known of 8192 slots as blocks of 16, for the ledger: 32 layers × K+V",
            ("gather_blocks",), Shape(2, 4096, sets=4, layers=32), layout="llama",
        ),
        Case(
            "gather_blocks/256", "the same of 16 blocks, as a decode of 256 completes them in one forward",
            ("gather_blocks",), Shape(16, 16, sets=16, layers=32), layout="llama",
        ),
        Case(
            "compare_tables/256x4096", "the list of slots that attention was given for 256 × 4096 tokens, against the "
            "table", ("compare_tables",), Shape(256, 4096), quick=True,
        ),
        Case(
            "compare_tables/1x131072", "the same of 1 request × 131,072 tokens", ("compare_tables",),
            Shape(1, 131072, sets=24),
        ),
        Case(
            "compare_kv/2048", "KV of 2048 tokens against the same computed again, 32 layers × K+V × 2048 B",
            ("compare_kv",), Shape(1, 2048, sets=8, layers=32), layout="llama",
        ),
        Case(
            "lifetime/8192", "the allocator gets 8192 slots back and hands them out again: two events", EVENTS,
            Shape(2, 4096, sets=16),
        ),
        Case(
            "lifetime/cached-8192", "the prefix cache keeps 8192 slots, shares, keeps and evicts them: five events",
            CACHE_EVENTS, Shape(2, 4096, sets=16),
        ),
        Case(
            "note/8192", "8192 slots were copied to others: their histories", ("note",), Shape(2, 4096, sets=16),
        ),
        Case(
            "compare_weights/268MB", "compare 268 MB of weights, 128 tensors of 32 layers, in chunks of 64 KiB",
            ("compare_weights",), Shape(16, 64, layers=32, spare_slots=1024), layout="llama", quick=True,
        ),
        Case(
            "baseline/llama", "baseline: fingerprint a pool of 32 layers × K+V × 2048 B at attach", ("baseline",),
            Shape(16, 2048, layers=32), layout="llama", quick=True,
        ),
    )
}  # fmt: skip
