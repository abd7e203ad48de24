"""Classes of real bugs, by root cause, each with public issues; and which of them no engine here can express."""

FREED = "freed while still used"
TWICE = "freed or handed out twice"
EARLY = "prefix published before it is filled"
PHANTOM = "prefix hit after eviction"
TABLE = "stale or overwritten table"
LENGTH = "wrong length"
ADDRESS = "wrong slot address"
DRAFT = "rejected draft left behind"
PADDING = "padding writes to live or null slots"
LAYOUT = "two parts of memory overlap, or a layout is misread"
WINDOW = "sliding window"
HOST = "host memory: copies not fenced"
PARTIAL = "part of the KV not saved or copied"
TIER = "another request's KV from a tier"
TRANSFER = "transfer between engines"
STATE = "recurrent state"
QUANTIZED = "quantized KV and its scales"
IDENTITY = "one prefix for two identities"
ZEROING = "zeroing and compaction"
TOKENS = "other tokens than were sampled"

CLASSES = {
    FREED: "pages freed on retract, abort or finish while they are still read or written",
    TWICE: "double free, double allocation",
    EARLY: "a prefix block is published before it is filled, or reused without its prefill",
    PHANTOM: "prefix hits on what was evicted",
    TABLE: "a page table is overwritten before its copy ran, or has stale entries",
    LENGTH: "attention is given a length that is a token short, a chunk's own, or another row's",
    ADDRESS: "slots are addressed wrongly: speculative decoding, M-RoPE, batches assembled in another order",
    DRAFT: "rejected drafts stay in the cache; uneven rows are rolled back alike",
    PADDING: "slot -1 is the last one; padded rows write NaN to slot 0",
    LAYOUT: "block ids of two groups overlap in memory; a layout is read from shapes in place of strides",
    WINDOW: "a stale map frees live slots; eviction inside of the window; a ring read on a prefix hit",
    HOST: "a load is not fenced, a page is released while it is copied, a store reads KV before it is written",
    PARTIAL: "index, state or scale buffers, or one of K and V, are not saved with the cache",
    TIER: "a disk or remote tier gives another request's KV; a failed store stays visible",
    TRANSFER: "pages are reused before the writer is done; regions merged or cut short",
    STATE: "recurrent states with speculation or a prefix cache",
    QUANTIZED: "FP8 and int8 KV, and their scales",
    IDENTITY: "images or LoRA adapters share placeholder tokens; block hashes collide",
    ZEROING: "zeroing or compaction runs at the wrong time or over the wrong slots",
    TOKENS: "the token that is computed next is not the one that was sampled",
}
"""Each with what belongs to it, in the order of the table."""

NOT_HERE = {
    TRANSFER: "takes two engines; canary-sglang's `test_disaggregation` breaks the transfer between two real ones",
}
"""Classes without an exhibit, and why."""
