"""`bytes`: the slot's bytes changed since they were recorded."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from canary_core.kinds.arrival import LOAD_BACK
from canary_core.kinds.case import Case, Copy, Damage, Pattern
from canary_core.kinds.classes import Class, Diagnosis
from canary_core.kinds.facts import NAMELESS, named
from canary_core.kinds.finding_kind import Blame, FindingKind, Page, Remedy, Sentence, Wrong
from canary_core.kinds.links import READ, Link
from canary_core.records import FREED_BY, POSITION, STATES, STEP_FREED, STEP_WRITTEN, WRITER, Kind, Phase, State

FLIPPED_BIT = Class(
    "flipped_bit",
    "a flipped bit",
    ("arXiv 2604.17249",),
    (
        "Run a memory test of the device (dcgmi diag -r 3) and its ECC counters (nvidia-smi -q -d ECC).",
        "See whether it comes back on another device.",
    ),
)

OVERWRITTEN_WORD = Class(
    "overwritten_word",
    "a stray write of a few bytes",
    ("llama.cpp#12253",),
    ("Look for a kernel that stores scalars (lengths, scales) near this layer's tensor.",),
)

SWAPPED = Class(
    "swapped",
    "two slots or pages whose KV was exchanged",
    ("vllm-ascend#16490", "kvcached#391", "trtllm#15546"),
    ("Look at what moves pages: defragmentation, swapping to host memory, a copy with a wrong index list.",),
)

OVERWRITTEN = Class(
    "overwritten",
    "another slot's KV, written over this one's",
    ("sglang#24527", "vllm#54498", "sglang#38319", "llama.cpp#14081"),
    ("Look at who wrote the other slot, and at the slot list of that forward or copy.",),
)

WRONG_LAYER = Class(
    "wrong_layer",
    "KV of another layer or half",
    ("kvcached#424", "LMCache#4463"),
    ("Look at offsets and strides of whatever copies layers: merged regions, a layout read from the shape.",),
)

SHIFTED = Class(
    "shifted",
    "KV that is one token off",
    ("vllm#54498", "sglang#26329", "mlx-vlm#1155"),
    ("Look at the source index of the copy or store: it starts one token early or late.",),
)

ZEROED = Class(
    "zeroed",
    "KV that was zeroed, or a copy that brought nothing",
    ("vllm#48085", "sglang#36738", "vllm#44238"),
    ("Look for a fill of freed pages that ran late, and for a transfer that ended before its data came.",),
)

POISONED = Class(
    "poisoned",
    "KV that is NaN: poisoned padding or memory that was never filled",
    ("vllm#43869", "vllm#57156", "sglang#35351"),
    ("Look at padded rows of the batch: where do they write?", "Set CANARY_NON_FINITE=true to see the first one."),
)

CONSTANT = Class(
    "constant",
    "KV filled with one byte: a fill pattern, or memory that was never written",
    ("vllm#48085", "LMCache#4463"),
    ("Look for debug fills and for buffers that are sent before they are written.",),
)

TORN_COPY = Class(
    "torn_copy",
    "a copy that ended half-way through a page",
    ("sglang#36738", "sglang#35769", "vllm#45704", "vllm#44238"),
    ("Look whether the page was freed, or read, before its transfer was done.",),
)

EVERY_NTH = Class(
    "every_nth",
    "every n-th token damaged",
    ("vllm#9730", "sglang#26329", "vllm-ascend#16490"),
    ("Look at n: a page size, a group of a kernel, a number of ranks, of draft tokens. A stride is wrong.",),
)

PAGE_EDGE = Class(
    "page_edge",
    "the first or last slot of each page damaged",
    ("vllm#42273", "sglang#24193", "trtllm#14565"),
    ("Look for an off-by-one at page borders: lengths rounded up, a last page that is partly filled.",),
)

ONE_HALF = Class(
    "one_half",
    "only K, or only V, damaged in all layers",
    ("sglang#38031", "LMCache#4463"),
    ("Look at what treats K and V apart: two copies of which one did not run, one pointer for both.",),
)

ONE_LAYER = Class(
    "one_layer",
    "one layer damaged over many tokens",
    ("kvcached#424", "vllm#45704"),
    ("Look at the kernels of this layer, and at layer-wise transfers: was it read before it had come?",),
)

PAGE_OVERWRITTEN = Class(
    "page_overwritten",
    "a whole page that something unknown was written over",
    ("sglang#38319", "sglang#24193", "vllm#45357"),
    ("Look for a free or a transfer of this page shortly before, and for writes of requests that had ended.",),
)

PREFIX_HIT = Class(
    "prefix_hit",
    "damage only in what a prefix hit brought",
    ("vllm#37152", "TGI#2489", "sglang#38031"),
    ("Compare with the prefix cache off. Look at what a hit does beside the table: copies, loads, evictions.",),
)

STRAY_WRITE = Class(
    "stray_write",
    "a stray write",
    ("vllm#43869", "llama.cpp#12253", "vllm-ascend#16490"),
    ("Look at what else ran in that forward on this layer; run with CANARY_READ_CHECK=-1 to come closer.",),
)

MEMORY = Remedy(
    "the device's memory",
    "take the machine out; `nvidia-smi -q -d ECC`, a memory test",
    when=", one slot, one bit, on one machine only",
)
TRANSFER = Remedy(
    "a copy or transfer that went wrong",
    "turn off what brings it (HiCache, the connector) and see whether it ends",
    when=" of whole pages, or of KV that was loaded back or sent",
)

CLASSES = (
    FLIPPED_BIT, OVERWRITTEN_WORD, SWAPPED, OVERWRITTEN, WRONG_LAYER, SHIFTED, ZEROED, POISONED, CONSTANT, TORN_COPY,
    EVERY_NTH, PAGE_EDGE, ONE_HALF, ONE_LAYER, PAGE_OVERWRITTEN, PREFIX_HIT, LOAD_BACK, STRAY_WRITE,
)  # fmt: skip

FILLS = ("zeros", "constant", "nan")
"""Shapes of bytes with a diagnosis of their own, also where other slots have equal bytes."""


def _diagnose(case: Case) -> Iterator[Diagnosis]:
    damage = case.damage
    where = damage.where
    shapes = Counter(p.shape for p in case.patterns)
    if sum(shapes[fill] for fill in FILLS) * 2 <= len(case.patterns):
        yield from _copied(case, damage)
    if shapes and len(shapes) == 1 and len(damage.slots) <= 2:
        yield from _flips(case, shapes, where)
    most, count = shapes.most_common(1)[0] if shapes else ("", 0)
    share = f"{count} of {len(case.patterns)} that were looked at"
    if most == "zeros" and count * 2 > len(case.patterns):
        yield Diagnosis(ZEROED, "likely", (f"all bytes are zero in {where}: {share}", *damage.layout))
    if most == "constant" and count * 2 > len(case.patterns):
        values = Counter(p.byte for p in case.patterns if p.shape == "constant")
        value = values.most_common(1)[0][0]
        nan = any(p.not_finite > 0.5 for p in case.patterns)
        fill = f"every byte is 0x{value:02x} in {where}: {share}"
        yield Diagnosis(POISONED if nan else CONSTANT, "likely", (fill, *damage.layout))
    if most == "nan" and count * 2 > len(case.patterns):
        yield Diagnosis(POISONED, "likely", (f"most numbers are NaN or infinite in {where}: {share}", *damage.layout))
    yield from _spread(damage)


def _flips(case: Case, shapes: Counter[str], where: str) -> Iterator[Diagnosis]:
    if "bit" in shapes or "two_bits" in shapes:
        told = tuple(sentence for p in case.patterns for sentence in _told_bits(p))
        changed = [(o ^ n).bit_count() for p in case.patterns for o, n in zip(p.old, p.new, strict=True)]
        single = max(changed) == 1
        told = (*told, f"nothing but {where} differs")
        yield Diagnosis(FLIPPED_BIT, "certain" if single and len(case.patterns) == 1 else "likely", told)
        if not single:
            yield Diagnosis(OVERWRITTEN_WORD, "possible", told)
    elif "word" in shapes:
        told = tuple(
            f"word {p.words[0]} of slot {p.slot} in {p.source} was 0x{p.old[0]:08x} and is 0x{p.new[0]:08x}"
            for p in case.patterns
        )
        yield Diagnosis(OVERWRITTEN_WORD, "likely", (*told, f"nothing but {where} differs"))


def _told_bits(pattern: Pattern) -> Iterator[str]:
    for word, old, new in zip(pattern.words, pattern.old, pattern.new, strict=True):
        bits = ", ".join(f"bit {bit}" for bit in range(32) if (old ^ new) >> bit & 1)
        yield (
            f"{bits} of 32-bit word {word} of slot {pattern.slot} in {pattern.source}: the word was 0x{old:08x} and "
            f"is 0x{new:08x}; by the fingerprint no other single change explains it"
        )


def _copied(case: Case, damage: Damage) -> Iterator[Diagnosis]:
    """Diagnoses where the bytes found belong to the records of other slots."""
    if not damage.copies:
        return
    own = [c for c in damage.copies if c.source == c.other_source]
    explained = len({(c.slot, c.source) for c in own})
    across = [c for c in damage.copies if c.source != c.other_source]
    if across and not own:
        copy, sure = across[0], "certain" if damage.cells == 1 else "likely"
        text = (
            f"slot {copy.slot} has in {copy.source} what was recorded of slot {copy.other_slot} in {copy.other_source}"
        )
        yield Diagnosis(WRONG_LAYER, sure, (text, *damage.layout))
        return
    sure = "certain" if explained * 5 > 4 * damage.looked_up else "possible"
    moved = _most_donors(own)
    if damage.exchanged:
        # Of several slots with the same bytes the one that has this slot's in exchange.
        own = [replace(c, other_slot=damage.exchanged.get(c.slot, c.other_slot)) for c in own]
    told = tuple(_told_copy(case, copy, own) for copy in _one_of_each(own)[:3])
    count = f"of {damage.looked_up} damaged places, {explained} have bytes that the records of another slot know"
    told = (*told, count, *damage.layout)
    if damage.exchanged:
        yield Diagnosis(SWAPPED, sure, told)
        return
    off = [slot for slot, other in moved.items() if _follows(case, other, slot)]
    if len(off) * 2 > len(moved):
        text = (
            f"{len(off)} of {len(moved)} slots hold the KV of the position before or after theirs, of the same request"
        )
        yield Diagnosis(SHIFTED, sure, (text, *told))
        return
    if not damage.donors_intact and sure == "certain":
        # What owned the bytes has changed, too, or was not looked at: more happened than this one copy.
        sure = "likely"
    yield Diagnosis(OVERWRITTEN, sure, told)


def _most_donors(copies: Sequence[Copy]) -> dict[int, int]:
    """By slot the most frequent owner of its bytes: where a layer has the same bytes for every like token, the first
    owner found may be any of them."""
    owners: dict[int, Counter[int]] = {}
    for copy in copies:
        owners.setdefault(copy.slot, Counter())[copy.other_slot] += 1
    return {slot: counts.most_common(1)[0][0] for slot, counts in owners.items()}


def _one_of_each(copies: Sequence[Copy]) -> list[Copy]:
    """The first one of each slot."""
    return list({copy.slot: copy for copy in reversed(copies)}.values())[::-1]


def _follows(case: Case, other: int, slot: int) -> bool:
    """Whether one slot holds the position next to the other's, of the same writer."""
    one, two = case.record(other), case.record(slot)
    if one is None or two is None:
        return False
    return one[WRITER] == two[WRITER] and abs(one[POSITION] // STATES - two[POSITION] // STATES) == 1


def _told_copy(case: Case, copy: Copy, copies: Sequence[Copy]) -> str:
    record = case.record(copy.other_slot)
    sources = [c.source for c in copies if (c.slot, c.other_slot) == (copy.slot, copy.other_slot)]
    where = ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
    text = f"slot {copy.slot} has, in {where}, the bytes that belong to slot {copy.other_slot}"
    if record is None or not record[STEP_WRITTEN]:
        return text
    who = named(case.name(record[WRITER])) or NAMELESS
    text += f", which {who} wrote at step {record[STEP_WRITTEN]} as position {record[POSITION] // STATES}"
    if record[POSITION] & State.FREED and record[STEP_FREED]:
        text += f"; it was freed at step {record[STEP_FREED]}"
        freer = named(case.name(record[FREED_BY]))
        text += f" by {freer}" if freer else ""
    return text


def _spread(damage: Damage) -> Iterator[Diagnosis]:
    """Where the damage is, whatever the bytes are."""
    if damage.arrived:
        yield Diagnosis(LOAD_BACK, "likely", (f"every damaged slot was loaded at {damage.arrived}", *damage.layout))
    if damage.every is not None:
        text = f"the damaged positions are {damage.every} apart, and those between are intact"
        yield Diagnosis(PAGE_EDGE if damage.edge else EVERY_NTH, "likely", (text, *damage.edges, *damage.layout))
    elif damage.edge:
        yield Diagnosis(PAGE_EDGE, "likely", (*damage.edges, *damage.layout))
    if damage.torn:
        yield Diagnosis(TORN_COPY, "likely" if len(damage.slots) > 1 else "possible", (damage.torn, *damage.layout))
    one_half = len(damage.halves) == 1 and damage.all_halves > 1
    if one_half and len(damage.layers) > 1 and len(damage.layers) == damage.all_layers:
        (half,) = damage.halves
        sure, count = ("possible", "up to") if damage.several else ("likely", "all")
        yield Diagnosis(ONE_HALF, sure, (f"only {half} differs, in {count} {damage.all_layers} layers", *damage.layout))
    if len(damage.layers) == 1 and len(damage.slots) > 2 and damage.all_layers > 1:
        yield Diagnosis(ONE_LAYER, "likely", (f"only layer {next(iter(damage.layers))} differs", *damage.layout))
    if damage.whole_page:
        yield Diagnosis(PAGE_OVERWRITTEN, "likely", (damage.whole_page, *damage.layout))
    sure = "likely" if damage.cells == 1 else "possible"
    yield Diagnosis(STRAY_WRITE, sure, (f"{damage.where} differs", *damage.layout))
    if damage.shared:
        # That shared slots are damaged says nothing of the hit: whatever writes to a wrong place meets cached pages.
        yield Diagnosis(PREFIX_HIT, "possible", (damage.shared, *damage.layout))


KIND = FindingKind(
    kind=Kind.BYTES,
    place=190,
    sentences=(
        Sentence(
            "the bytes of {where} changed between the store of layer {v.layer} and the end of the forward in which "
            "{reader} wrote {position} there: a stray write, a race with the forward, or a flipped bit.",
            when=lambda v: v.phase is Phase.POST_FORWARD and v.layer is not None and v.layer >= 0,
        ),
        Sentence(
            "the bytes that were copied or loaded to {where} are not those that {writer} wrote{written}: they were "
            "left out, came from the wrong place or too early, or had changed before.",
            when=lambda v: v.phase is Phase.EVENT and bool(v.arrived),
        ),
        Sentence(
            "the bytes of {where}, which were copied or loaded there, are not those that its record tells of "
            "({writer}{written}): a bad copy or transfer, a stray write, a race, or a flipped bit.",
            when=lambda v: bool(v.arrived),
        ),
        Sentence(
            "the bytes of {where} changed since {writer} wrote them{written}: a stray write, a race, a bad copy, or "
            "a flipped bit."
        ),
    ),
    brings={Kind.BYTES: {Link.CONTENT, *READ}, Kind.NON_FINITE: {Link.STEP, Link.SLOT}},
    diagnose=_diagnose,
    classes=CLASSES,
    blame=Blame(
        "PoolAdapter",
        "bytes change that no view said are written: strides, page_size, layers that share memory, or copies of the "
        "engine that are not told",
    ),
    page=Page(
        wrong=Wrong.BYTES,
        means="""
        The bytes of the slot changed since they were written. With phase `event`: bytes were copied or loaded there,
        and they are not those that were written at the source. With phase `post_forward`: they changed between the
        store of the layer and the end of the same forward (`CANARY_STORE_CHECK`).
        """,
        causes="""
        A kernel that writes to a wrong place (a stray write). A race between streams. A copy that was torn. A flipped
        bit.
        """,
        next_steps="""
        `layer` and `half` say which tensor. One slot in one layer points to a flipped bit or to one kernel. The same
        slot in all layers points to a copy, or to a slot that another request got. With phase `scrub` the change may be
        many forwards old; use `CANARY_READ_CHECK=-1` to come closer. With `arrived` the bytes may have been wrong when
        they came: look at the copy or the transfer first. The slot stays compared with what was recorded: the same
        change is told once, each further one is a new finding, and bytes that are what they were, or are written again,
        are right. After a `lost_write` what lies in the slot is what it is compared with; a write that is lost there
        again is told again.
        """,
        remedies=(MEMORY, TRANSFER),
    ),
)
