"""`Diagnosis`, and the classes of bugs by name: what each is, which public bugs were like it, what to do next."""

from dataclasses import dataclass

SURE = ("certain", "likely", "possible")
"""How sure a diagnosis is: it follows from a 64-bit fingerprint or from the engine's own events; it is what such a
pattern usually means; it is one of several explanations."""


@dataclass(frozen=True, slots=True)
class Class:
    """``title`` ends the sentence "this looks like ...". ``bugs``: public issues and pull requests of the same sort."""

    title: str
    bugs: tuple[str, ...]
    next_steps: tuple[str, ...]


_FLIPS = "a memory test of the device (dcgmi diag -r 3) and its ECC counters (nvidia-smi -q -d ECC)"

CLASSES: dict[str, Class] = {
    "flipped_bit": Class(
        "a flipped bit", ("arXiv 2604.17249",), (f"Run {_FLIPS}.", "See whether it comes back on another device.")
    ),
    "overwritten_word": Class(
        "a stray write of a few bytes",
        ("llama.cpp#12253",),
        ("Look for a kernel that stores scalars (lengths, scales) near this layer's tensor.",),
    ),
    "swapped": Class(
        "two slots or pages whose KV was exchanged",
        ("vllm-ascend#16490", "kvcached#391", "trtllm#15546"),
        ("Look at what moves pages: defragmentation, swapping to host memory, a copy with a wrong index list.",),
    ),
    "overwritten": Class(
        "another slot's KV, written over this one's",
        ("sglang#24527", "vllm#54498", "sglang#38319", "llama.cpp#14081"),
        ("Look at who wrote the other slot, and at the slot list of that forward or copy.",),
    ),
    "wrong_layer": Class(
        "KV of another layer or half",
        ("kvcached#424", "LMCache#4463"),
        ("Look at offsets and strides of whatever copies layers: merged regions, a layout read from the shape.",),
    ),
    "shifted": Class(
        "KV that is one token off",
        ("vllm#54498", "sglang#26329", "mlx-vlm#1155"),
        ("Look at the source index of the copy or store: it starts one token early or late.",),
    ),
    "zeroed": Class(
        "KV that was zeroed, or a copy that brought nothing",
        ("vllm#48085", "sglang#36738", "vllm#44238"),
        ("Look for a fill of freed pages that ran late, and for a transfer that ended before its data came.",),
    ),
    "poisoned": Class(
        "KV that is NaN: poisoned padding or memory that was never filled",
        ("vllm#43869", "vllm#57156", "sglang#35351"),
        ("Look at padded rows of the batch: where do they write?", "Set CANARY_NON_FINITE=true to see the first one."),
    ),
    "constant": Class(
        "KV filled with one byte: a fill pattern, or memory that was never written",
        ("vllm#48085", "LMCache#4463"),
        ("Look for debug fills and for buffers that are sent before they are written.",),
    ),
    "torn_copy": Class(
        "a copy that ended half-way through a page",
        ("sglang#36738", "sglang#35769", "vllm#45704", "vllm#44238"),
        ("Look whether the page was freed, or read, before its transfer was done.",),
    ),
    "every_nth": Class(
        "every n-th token damaged",
        ("vllm#9730", "sglang#26329", "vllm-ascend#16490"),
        ("Look at n: a page size, a group of a kernel, a number of ranks, of draft tokens. A stride is wrong.",),
    ),
    "page_edge": Class(
        "the first or last slot of each page damaged",
        ("vllm#42273", "sglang#24193", "trtllm#14565"),
        ("Look for an off-by-one at page borders: lengths rounded up, a last page that is partly filled.",),
    ),
    "one_half": Class(
        "only K, or only V, damaged in all layers",
        ("sglang#38031", "LMCache#4463"),
        ("Look at what treats K and V apart: two copies of which one did not run, one pointer for both.",),
    ),
    "one_layer": Class(
        "one layer damaged over many tokens",
        ("kvcached#424", "vllm#45704"),
        ("Look at the kernels of this layer, and at layer-wise transfers: was it read before it had come?",),
    ),
    "page_overwritten": Class(
        "a whole page that something unknown was written over",
        ("sglang#38319", "sglang#24193", "vllm#45357"),
        ("Look for a free or a transfer of this page shortly before, and for writes of requests that had ended.",),
    ),
    "prefix_hit": Class(
        "damage only in what a prefix hit brought",
        ("vllm#37152", "TGI#2489", "sglang#38031"),
        ("Compare with the prefix cache off. Look at what a hit does beside the table: copies, loads, evictions.",),
    ),
    "load_back": Class(
        "damage only in what was loaded back",
        ("sglang#36738", "sglang#35769", "sglang#31427", "LMCache#4385", "LMCache#4463"),
        (
            "Look at the fence between the load and the first read, and whether pages are released in between.",
            "If every load differs: does what moves the pages read the cache's shape and strides as the engine does?",
        ),
    ),
    "stray_write": Class(
        "a stray write",
        ("vllm#43869", "llama.cpp#12253", "vllm-ascend#16490"),
        ("Look at what else ran in that forward on this layer; run with CANARY_READ_CHECK=-1 to come closer.",),
    ),
    "use_after_free": Class(
        "a slot that is read after it was freed",
        ("sglang#38319", "sglang#24193", "vllm#45357", "vllm-ascend#13501", "trtllm#12540"),
        ("Look who freed it, and why the request that reads it still names it: a retraction, an abort, a lost lock.",),
    ),
    "write_after_free": Class(
        "a slot that is written after it was freed",
        ("sglang#38319", "trtllm#14565", "OSCAR#4"),
        ("Look for a request that ended while one of its forwards was planned.",),
    ),
    "double_free": Class(
        "a slot that was released twice",
        ("sglang#38941", "vllm-ascend#14055"),
        ("Look for two ways in which the request ended, and for a reference count below zero.",),
    ),
    "double_allocation": Class(
        "a slot that was handed out twice",
        ("sglang#38941", "local-inference-lab/vllm#480"),
        ("Look for a slot that is in the free list twice, or in the free list and in the prefix cache.",),
    ),
    "evicted_in_use": Class(
        "an eviction of what a request still has",
        ("sglang#27586", "sglang#34870", "ATOM#1417"),
        ("Look at the lock count of that prefix: when was it taken, and was it taken for all of it?",),
    ),
    "lost_write": Class(
        "a store that never ran, or went elsewhere, in all layers",
        ("vllm#43869", "sglang#32477", "vllm#47282"),
        ("Look at the slot list of that forward, and at findings of other slots in the same step.",),
    ),
    "lost_write_of_a_layer": Class(
        "a store of one layer or half that never ran, or went elsewhere",
        ("vllm#47282", "sglang#38031"),
        ("Look at this layer's store: its mask, its grid, a condition that skips it.",),
    ),
    "wrong_write_slot": Class(
        "a token stored where its request won't look for it",
        ("vllm#54498", "sglang#26329", "trtllm#15546"),
        ("Look which of slot list and table was changed after the other one was made.",),
    ),
    "two_writers": Class(
        "two tokens of one batch stored in one slot",
        ("sglang#38941", "vllm#43869"),
        ("Look at the allocation of both requests, and at padding that is given a real slot.",),
    ),
    "batch_input": Class(
        "a batch that was put together wrongly",
        ("vllm#54498", "sglang#26329"),
        ("Look at rows that were exchanged, lengths that are off by one, and token lists of the step before.",),
    ),
    "stale_table": Class(
        "a table entry that names another request's slot",
        ("trtllm#15546", "vllm#42273", "sglang#27586"),
        ("Look who wrote this row of the table last, and whether the copy to the device was done.",),
    ),
    "wrong_table_copy": Class(
        "a table that attention was given and that is not the engine's own",
        ("trtllm#15546", "vllm#42273"),
        ("Look when the backend made this table, from what, and who has written to its buffer since.",),
    ),
    "wrong_position": Class(
        "a table that names the request's own slots in a wrong order",
        ("vllm#9730", "sglang#26329", "vllm#54498"),
        ("Look how positions become slots: an offset of the page, of a draft token, of a chunk.",),
    ),
    "foreign_prefix": Class(
        "a prefix of another request",
        ("LMCache#4385", "LMCache#4086", "vllm#54342", "local-inference-lab/vllm#480"),
        ("Look at the match in the prefix cache: a collision of hashes, a key without image, LoRA or salt.",),
    ),
    "rolled_back": Class(
        "a rejected draft that was left behind",
        ("mlx-vlm#1155", "transformers#48280"),
        ("Look at the roll-back after the last verification: rows of different lengths, one layer left out.",),
    ),
    "unfilled_prefix": Class(
        "a prefix that was published before it was filled",
        ("vllm#37152", "TGI#2489"),
        ("Look when the block went into the prefix cache, and when it was written.",),
    ),
    "unwritten": Class(
        "a slot that nobody has written",
        ("vllm#37152", "trtllm#15546", "vllm#42273"),
        ("Look at the table entry: was it ever filled? And at lost writes of earlier forwards.",),
    ),
    "broken_table": Class(
        "a table entry that is no slot",
        ("trtllm#15546", "vllm#42273"),
        ("Look who writes this row, and whether the request is as long as the batch says.",),
    ),
    "padding": Class(
        "padding in a live row, or a window entry evicted too early",
        ("vllm#43869", "sglang#27586", "sglang#8649", "sglang#30339"),
        ("Look how the batch is padded; in a window, compare the position with the window's end.",),
    ),
    "broken_cache": Class(
        "a prefix cache that contradicts itself",
        ("sglang#38941", "sglang#27789"),
        ("Find the node; look for unusual ends of requests (abort, retraction) just before.",),
    ),
    "non_finite": Class(
        "numbers that are NaN or infinite when they are written",
        ("vllm#57156", "sglang#35351", "trtllm#2699"),
        ("Look at the first layer that has it: an overflow, or poisoned padding that got into a live row.",),
    ),
    "unknown": Class(
        "none of the classes that are known here",
        (),
        ("Run the same traffic with CANARY_READ_CHECK=-1 and CANARY_MODE=raise, to come closer to the cause.",),
    ),
}
"""What `diagnose` may say, by name. First what bytes look like, then who has a slot, then what a forward
writes and reads."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``name``: one of `CLASSES`; ``sure``: one of `SURE`. ``evidence``: sentences, each something that was seen."""

    name: str
    sure: str
    evidence: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The class and how sure that is."""
        verb = {"certain": "This is", "likely": "This is probably", "possible": "This may be"}[self.sure]
        return f"{verb} {CLASSES[self.name].title}."

    @property
    def bugs(self) -> tuple[str, ...]:
        """Public bugs that it resembles."""
        return CLASSES[self.name].bugs

    @property
    def next_steps(self) -> tuple[str, ...]:
        """What to do next."""
        return CLASSES[self.name].next_steps

    def fields(self) -> dict[str, object]:
        """As plain values."""
        return {
            "diagnosis": self.name,
            "sure": self.sure,
            "sentence": self.sentence,
            "evidence": list(self.evidence),
            "resembles": list(self.bugs),
            "next_steps": list(self.next_steps),
        }
