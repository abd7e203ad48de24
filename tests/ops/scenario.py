"""Random states and batches for the ops: real histories with faults planted in them, so that every branch is taken."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from canary_core import BatchView, CanaryConfig, KVSource, ReadLens, ReadTable, Region, RegionKind, SlotTable
from canary_core.ops import hashing
from canary_core.ops.blocks import BlockShape
from canary_core.ops.launches import LaunchCache
from canary_core.ops.state import RegionState, Shared
from canary_core.ops.torch import plan
from canary_core.records import (
    FIRST_CONTENT,
    HISTORY,
    HISTORY_EVENT_BITS,
    HISTORY_NUMBER_BITS,
    NO_SAMPLE,
    NOT_SAMPLED,
    POSITION,
    SAMPLE_POSITION_BITS,
    SAMPLE_TOKEN_BITS,
    SAMPLE_TOKENS,
    SAMPLE_WRITERS,
    STATES,
    Cursor,
    Happened,
    NullBytes,
    ScrubWord,
)
from canary_core.region import Role

TABLES = ("records", "fingerprints", "chains", "cursors", "listed", "stores", "histories")
SCRATCH = ("claims", "heads", "plan")
"""Tensors of a `RegionState` and of its scratch that ops change."""

SAMPLES = ("table", "given", "ends", "tails")
"""The same of what is known of the sampler."""

TOKENS = 50
"""Vocabulary: small, so that equal tokens meet."""


@dataclass
class Scenario:
    """One region of a random layout, and the choices that batches on it need."""

    region: Region
    random: random.Random
    page_size: int
    ring_slots: int
    pool_page: tuple[int, int] | None
    device: torch.device
    unknown: random.Random
    """Chooses the fingerprints that are not known, and leaves the other choices as they are."""
    scrub: random.Random
    """The same for what the scrub has listed and how far it goes."""
    sampler: random.Random
    """The same for what the sampler gives."""
    nulls: random.Random
    """The same for what was seen of null slots."""

    def state(self, **settings: object) -> RegionState:
        config = CanaryConfig(**{"ring_rows": 4096, "read_check": -1, "store_check": True, **settings})
        shared = Shared.allocate(config, self.device)
        state = RegionState(self.region, 0, shared, config)
        state.cursors[Cursor.SCRUB_SLOTS] = self.random.randint(0, self.region.slots)
        state.cursors[Cursor.SCRUB_RUNNING] = self.scrub.randint(0, self.region.slots)
        state.cursors[Cursor.SCRUB_PASS] = self.scrub.choice([self.region.slots, self.scrub.randint(0, 99)])
        # What was listed may be free again by now, or written anew.
        list_slots(state, self.scrub.sample(range(self.region.slots), self.scrub.randint(0, self.region.slots)))
        state.fingerprints.random_(-(2**62), 2**62)
        assert state.histories is not None
        # What happened before, some of it what a request is about to do again.
        state.histories.copy_(torch.tensor([[entry(self.scrub) for _ in range(HISTORY)] for _ in state.histories]))
        if self.region.tokens_per_slot == 1 and self.sampler.random() < 0.9:
            state.follow_sampler()
        return state


def entry(rng: random.Random) -> int:
    """A history's entry: often nothing, or one of few writers and steps."""
    step, who, event = rng.choice([0, 1, 2**30 - 1]), rng.choice([0, 1, 2, 2**30 - 1]), rng.choice([0, *Happened])
    return hashing.signed((step << HISTORY_NUMBER_BITS | who) << HISTORY_EVENT_BITS | event) if event else 0


def scenario(seed: int, device: str = "cpu", layers: int = 0) -> Scenario:
    """A region with sources of several shapes: bfloat16 rows, heads-first pages, unaligned bytes with a tail; with
    ``layers`` several layers of each, as many and fewer."""
    rng = random.Random(seed)
    slots = rng.choice([17, 40, 64])
    sources = [
        _rows(rng, slots, "k", 0, torch.bfloat16, rng.choice([16, 24, 63]), device),
        _rows(rng, slots, "v", 0, torch.uint8, rng.choice([1, 5, 33, 40]), device),
        _heads_first(rng, slots, "k", 1, device),
        _rows(rng, slots, "v", 1, rng.choice([torch.float16, torch.float32, torch.float8_e5m2]), 16, device),
    ]
    sources = rng.sample(sources, rng.randint(1, len(sources)))
    more = random.Random(f"layers {seed}")
    for source in sources[:]:
        more_layers = range(more.randint(1, layers) if layers else 0)
        sources += [
            replace(source, layer=source.layer + 10 * (n + 1), tensor=source.tensor.clone()) for n in more_layers
        ]
    kind = rng.choice([*RegionKind, RegionKind.FULL, RegionKind.WINDOW])
    window = rng.choice([1, 6]) if kind is RegionKind.WINDOW else None
    page_size = rng.choice([1, 1, 4])
    slot_map = None
    # Chosen apart, so that the other choices of a seed stay what they are.
    ring_rng = random.Random(f"ring {seed}")
    page_ring = (8, 4) if kind is RegionKind.RING and ring_rng.random() < 0.6 else None
    if rng.random() < 0.3:
        slot_map = torch.tensor([rng.randrange(-1, slots) for _ in range(slots + rng.randint(-3, 3))], device=device)
    null_slot = rng.choice([None, 0, 3])
    null_rng = random.Random(f"null {seed}")
    region = Region(
        "r",
        slots,
        tuple(sources),
        kind=kind,
        tokens_per_slot=rng.choice([2, 4]) if kind is RegionKind.COMPRESSED else 1,
        window_tokens=window,
        chunked=window is not None and random.Random(f"chunk {seed}").random() < 0.4,
        group_tokens=ring_rng.choice([2, 3]) if kind is RegionKind.RING else 0,
        overlap_tokens=ring_rng.choice([0, 1]) if kind is RegionKind.RING else 0,
        page_ring=page_ring,
        slot_map=slot_map,
        null_slot=null_slot,
        null_slots=1 if null_slot is None else null_rng.choice([1, 1, 4]),
    )
    ring = rng.choice([0, 0, 8]) if window else int(kind is RegionKind.STATE)
    if kind is RegionKind.RING and page_ring is None:
        ring = 8
    pool_page = rng.choice([None, None, (7, 5)])
    unknown = random.Random(f"unknown {seed}")
    scrub = random.Random(f"scrub {seed}")
    sampler = random.Random(f"sampler {seed}")
    nulls = random.Random(f"nulls {seed}")
    return Scenario(region, rng, page_size, ring, pool_page, torch.device(device), unknown, scrub, sampler, nulls)


def history(s: Scenario, steps: int) -> list[tuple[BatchView, SlotTable]]:
    """A few forwards of the same requests, each going on where the one before ended, most of the time."""
    rng, device = s.random, s.device
    rows = rng.choice([1, 2, 5, 9])
    length = [0] * rows
    out = []
    width = rng.choice([12, 30])
    highest = s.region.slots // s.page_size - 1
    if s.pool_page:
        highest = (highest // s.pool_page[1]) * s.pool_page[0]
    order = list(range(max(highest, 1)))
    rng.shuffle(order)
    table = torch.zeros(rows + 2, width, dtype=rng.choice([torch.int32, torch.int64]), device=device)
    for r in range(rows + 2):
        for c in range(width):
            table[r, c] = order[(r * 7 + c) % len(order)] if rng.random() < 0.97 else rng.randint(-2, highest + 9)
    own = [[rng.randrange(TOKENS) for _ in range(200)] for _ in range(rows)]
    index = torch.tensor(rng.sample(range(rows + 2), rows), device=device) if rng.random() < 0.5 else None
    for _ in range(steps):
        for r in range(rows):
            if rng.random() < 0.1:
                length[r] = rng.randint(0, 12)
        new = [rng.choice([0, 1, 1, 3, 9, 14]) for _ in range(rows)]
        tokens = [own[r][length[r] + i] for r in range(rows) for i in range(new[r])]
        other = [*range(TOKENS), FIRST_CONTENT, FIRST_CONTENT + 1]
        tokens = [t if rng.random() < 0.97 else rng.choice(other) for t in tokens]
        positions = [length[r] + i for r in range(rows) for i in range(new[r])]
        spare = rng.choice([0, 0, 3, -2])
        listed = None
        if rng.random() < 0.5:
            listed = torch.tensor(
                [rng.choice([*order, -1, highest + 30]) for _ in range(max(len(tokens) - 1, 0))],
                device=device,
                dtype=torch.int64,
            )
        if spare >= 0:
            tokens, positions = tokens + [1] * spare, positions + [0] * spare
        elif len(tokens) >= 2:
            tokens, positions = tokens[:spare], positions[:spare]
        kind = rng.choice([torch.int32, torch.int64])
        entries, rows_of = table, index
        if s.random.random() < 0.3:
            # One list of slots, with the rows' first elements.
            entries = table.as_strided((1, table.numel()), (1, 1))
            rows_of = (torch.arange(rows, device=device) if index is None else index) * width - rng.choice([0, 0, 2])
        slot_table = SlotTable(
            entries,
            rows_of,
            s.page_size,
            s.ring_slots,
            listed,
            0 if s.ring_slots else rng.choice([0, 0, 5]),
            s.pool_page,
        )
        expected = torch.tensor([row[: width - 2] for row in own], dtype=torch.int32, device=device)
        expected[torch.rand(expected.shape, device=device) < 0.1] = -1
        batch = BatchView(
            prefix_lens=torch.tensor(length, dtype=kind, device=device),
            new_lens=torch.tensor(new, dtype=kind, device=device),
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            writers=torch.tensor([rng.choice([-1, r, r]) for r in range(rows)], dtype=torch.int32, device=device),
            # A view refuses a short list of slots; the kernels do not read beyond it all the same.
            tables={"r": replace(slot_table, write_slots=None)},
            positions=torch.tensor(positions, dtype=kind, device=device) if rng.random() < 0.5 else None,
            expected_tokens=expected if rng.random() < 0.7 else None,
            anchors=torch.tensor([max(rng.getrandbits(60) - (1 << 58), 0) for _ in range(rows)], device=device)
            if rng.random() < 0.3
            else None,
        )
        out.append((batch, slot_table))
        length = [n + m for n, m in zip(length, new, strict=True)]
    return out


def events(s: Scenario) -> torch.Tensor:
    """Slots of an allocator's event, without repeats, some of them no slots of the region."""
    slots = s.random.sample(range(-2, s.region.slots + 3), s.random.choice([0, 1, 9]))
    return torch.tensor(slots, dtype=s.random.choice([torch.int32, torch.int64]), device=s.device)


def blocks(s: Scenario, table: SlotTable) -> list[tuple[BlockShape, torch.Tensor]]:
    """Slots of blocks: runs of a table's entries, as requests have them, and random numbers of slots and of pages, some
    of them none of the region's; fewer in a block than a tile of the kernel, and more."""
    page_slots = s.random.choice([1, 3, 4, 19])
    entries = table.elements[: len(table.elements) // page_slots * page_slots]
    kind = s.random.choice([torch.int32, torch.int64])
    random_slots = [s.random.randrange(-2, s.region.slots + 2) for _ in range(page_slots * s.random.choice([1, 5]))]
    pages = [s.random.randrange(-1, s.region.slots // page_slots + 2) for _ in range(5)]
    return [
        (BlockShape(page_slots), entries),
        (BlockShape(page_slots), torch.tensor(random_slots, dtype=kind, device=s.device)),
        (BlockShape(page_slots, paged=True), torch.tensor(pages, dtype=kind, device=s.device)),
    ]


def read_table(s: Scenario, batch: BatchView, table: SlotTable) -> ReadTable:
    """What attention was given beside ``table``: a copy of it, or one list of numbers of slots, or of the region's own
    slots, for some of the positions; with some entries that are others."""
    rng = random.Random(f"tables {s.random.random()}")
    rows, device, kind = batch.rows, s.device, rng.choice([torch.int32, torch.int64])
    first = torch.tensor([rng.choice([0, 0, 3, -1]) for _ in range(rows)], dtype=kind, device=device)
    end = batch.prefix_lens.to(kind) + rng.choice([0, 0, 1, -2])
    own_slots = False
    if rng.random() < 0.4:
        given = replace(table, entries=table.entries.clone(), write_slots=None)
        flat = given.elements
    else:
        places = plan.expand(first.clamp(min=0).long(), torch.maximum(end, first.clamp(min=0)).long())
        flat, _ = plan.numbers(table, places)
        own_slots = rng.random() < 0.3
        if own_slots:
            flat, _ = plan.lookup(s.region, table, places)
        flat = torch.cat((flat, flat.new_zeros(1))).to(kind)
        count = torch.maximum(end, first.clamp(min=0)) - first.clamp(min=0)
        starts = (count.cumsum(0) - count - first.clamp(min=0)).to(kind)
        given = SlotTable(flat.as_strided((1, len(flat)), (1, 1)), starts, pool_page=s.pool_page)
    for _ in range(rng.choice([0, 1, 5])):
        flat[rng.randrange(len(flat))] = rng.choice([-1, 0, 5, s.region.slots - 1, s.region.slots + 70])
    lens = tuple(read_lens(rng, end) for _ in range(rng.choice([0, 1, 2])))
    common = rng.choice([0, 0, 0, 2, 40])
    return ReadTable("kv_indices", "r", given, table, first, end, batch.writers, own_slots, common, lens)


def read_lens(rng: random.Random, expected: torch.Tensor) -> ReadLens:
    """Lengths that attention was given beside ``expected``: one a row or where each row begins, with padding behind and
    some others."""
    kind, padding = rng.choice([torch.int32, torch.int64]), rng.choice([0, 3])
    given = torch.cat((expected.to(kind), torch.full((padding,), 7, dtype=kind, device=expected.device)))
    begins = rng.random() < 0.5
    if begins:
        given = torch.cat((given.new_full((1,), rng.choice([0, 5])), given)).cumsum(0).to(kind)
    for _ in range(rng.choice([0, 0, 1, 2])):
        given[rng.randrange(len(given))] += rng.choice([-1, 1, -30])
    return ReadLens("lens", given, expected, begins)


def ownership(s: Scenario) -> tuple[torch.Tensor, int | torch.Tensor, int]:
    """An allocator's event: slots or pages, one writer or one for each, slots of a page."""
    slots, page_slots = events(s), s.random.choice([1, 1, 3, 4])
    if page_slots > 1:
        slots = slots[slots < s.region.slots // page_slots + 2]
    if s.random.random() < 0.5:
        return slots, s.random.randint(-1, 5), page_slots
    writers = [s.random.randint(-1, 5) for _ in slots]
    return slots, torch.tensor(writers, dtype=torch.int32, device=s.device), page_slots


def notes(s: Scenario) -> tuple[torch.Tensor, int, int | torch.Tensor]:
    """What happened to slots beside forwards: slots, some of them twice, what it was, and one who did it, or slots that
    they were copied from."""
    rng = random.Random(f"notes {s.nulls.random()}")
    slots = [rng.randrange(-2, s.region.slots + 3) for _ in range(rng.choice([0, 1, 9, 30]))]
    kind = rng.choice([torch.int32, torch.int64])
    who: int | torch.Tensor = rng.randint(-1, 3)
    if rng.random() < 0.5:
        # The same of the same slot.
        who = torch.tensor([slot * 3 % 7 - 1 for slot in slots], dtype=kind, device=s.device)
    return torch.tensor(slots, dtype=kind, device=s.device), int(rng.choice(list(Happened))), who


def sample(s: Scenario, state: RegionState, batch: BatchView, following: BatchView | None) -> None:
    """The sampler gives the rows of ``batch`` tokens, one or several of each, now and then none, and tokens that are
    too large to be kept. What it gave for the positions around the beginning of each row of ``following`` is known from
    earlier; mostly that is what the row computes, or what a slot holds."""
    if state.samples is None:
        return
    rng = s.sampler
    tokens = torch.full((batch.rows, rng.choice([1, 1, 3, 20])), NO_SAMPLE, dtype=torch.int64)
    for row in range(batch.rows):
        for column in range(tokens.shape[1]):
            tokens[row, column] = rng.choice([NO_SAMPLE, NOT_SAMPLED, 1 << 22, rng.randrange(TOKENS)])
    tokens = tokens.to(rng.choice([torch.int32, torch.int64])).to(s.device)
    if tokens.shape[1] == 1 and rng.random() < 0.8:
        tokens = tokens[:, 0]
    if rng.random() < 0.9:
        state.samples.give(tokens, tuple(rng.sample(range(batch.rows), rng.choice([0, 0, 1]))))
    if following is None:
        return
    first, words = 0, state.records[:, POSITION].tolist()
    held = {word // STATES: token for word, token in zip(words, state.records[:, 0].tolist(), strict=True) if word > 0}
    rows = zip(following.prefix_lens.tolist(), following.new_lens.tolist(), following.writers.tolist(), strict=True)
    for prefix, new, writer in rows:
        for position in range(max(prefix - 9, 1), prefix + 4):
            index = first + position - prefix
            computed = prefix <= position < prefix + new and index < following.tokens
            token = int(following.token_ids[index]) if computed else held.get(position, 0) & 0xFFFF
            if rng.random() < 0.2:
                token = rng.randrange(TOKENS)
            if writer >= 0 and rng.random() < 0.7:
                kept = writer % SAMPLE_WRITERS * SAMPLE_TOKENS + position % SAMPLE_TOKENS
                key = writer << SAMPLE_POSITION_BITS | position
                state.samples.table[kept] = key << SAMPLE_TOKEN_BITS | token
        first += new


def disturb(s: Scenario, state: RegionState) -> None:
    """Plants faults: flipped record words and bytes, other states, NaNs, fingerprints that are not known."""
    rng = s.random
    for _ in range(s.unknown.choice([0, 2, 9])):
        columns = s.unknown.choice([slice(None), s.unknown.randrange(state.sources.columns)])
        state.fingerprints[s.unknown.randrange(s.region.slots), columns] = 0
    # A scrub may be asked for a probe, now and then of a source that there is not.
    state.cursors[Cursor.PROBE] = s.unknown.randrange(len(state.sources.labels) + 2)
    for slot in s.region.null_range:
        seen = [s.nulls.choice([*NullBytes, NullBytes.FINITE, 0, 77]) for _ in range(state.sources.columns)]
        state.fingerprints[slot] = torch.tensor(seen, device=s.device)
    for _ in range(rng.choice([0, 1, 4])):
        state.records[rng.randrange(s.region.slots), rng.randrange(8)] ^= 1 << rng.randrange(31)
    for _ in range(rng.choice([0, 2])):
        slot = rng.randrange(s.region.slots)
        state.records[slot, POSITION] = state.records[slot, POSITION] // STATES * STATES + rng.randrange(STATES)
    for _ in range(rng.choice([0, 1, 4])):
        source = rng.choice(s.region.sources)
        flat = source.tensor.view(torch.uint8).view(-1)
        flat[rng.randrange(flat.numel())] ^= 1 << rng.randrange(8)
    if rng.random() < 0.3:
        source = rng.choice(s.region.sources)
        source.tensor.view(torch.uint8).view(-1)[rng.randrange(8) :] = rng.choice([0x7F, 0xFF, 0x7C])


def write(s: Scenario) -> None:
    """A forward: some of the pool changes."""
    rng = s.random
    for source in s.region.sources:
        if rng.random() < 0.8:
            flat = source.tensor.view(torch.uint8).view(-1)
            fresh = torch.randint(
                0, 256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(rng.getrandbits(30))
            )
            keep = torch.rand(flat.shape, generator=torch.Generator().manual_seed(rng.getrandbits(30))) < 0.3
            flat.copy_(torch.where(keep.to(flat.device), flat, fresh.to(flat.device)))


def list_slots(state: RegionState, slots: Sequence[int]) -> None:
    """The next scrub compares ``slots``."""
    state.listed[0, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    state.cursors[Cursor.SCRUB + ScrubWord.LIST] = len(slots)


def twin(state: RegionState) -> RegionState:
    """A copy with device memory of its own, on the same guarded bytes."""
    other = copy.copy(state)
    other.shared = Shared(*(t.clone() for t in (state.shared.counters, state.shared.clock, state.shared.ring)))
    for name in _tables(state):
        setattr(other, name, getattr(state, name).clone())
    other.scratch = copy.copy(state.scratch)
    for name in SCRATCH:
        setattr(other.scratch, name, getattr(state.scratch, name).clone())
    if state.samples is not None:
        other.samples = copy.copy(state.samples)
        for name in SAMPLES:
            setattr(other.samples, name, getattr(state.samples, name).clone())
    # Launches on the original know its addresses.
    other.launches = LaunchCache()
    return other


def _tables(state: RegionState) -> list[str]:
    """`TABLES`; regions of many tiny slots have no histories."""
    return [name for name in TABLES if getattr(state, name) is not None]


def differences(state: RegionState, other: RegionState, tokens: int) -> list[str]:
    """Names of the tensors that differ. Ring rows are compared as a set: the order of atomics is free."""
    pairs = {name: (getattr(state, name), getattr(other, name)) for name in _tables(state)}
    pairs |= {name: (getattr(state.scratch, name), getattr(other.scratch, name)) for name in SCRATCH}
    if state.samples is not None:
        pairs |= {name: (getattr(state.samples, name), getattr(other.samples, name)) for name in SAMPLES}
    pairs["plan"] = (state.scratch.plan[:tokens], other.scratch.plan[:tokens])
    pairs["counters"] = (state.shared.counters, other.shared.counters)
    pairs["clock"] = (state.shared.clock, other.shared.clock)
    names = [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]
    if ring_rows(state) != ring_rows(other):
        names.append("ring")
    return names


def ring_rows(state: RegionState) -> list[list[int]]:
    """The findings in the ring without their number, sorted."""
    return sorted(row[1:] for row in state.shared.ring.tolist() if row[0])


def _rows(
    rng: random.Random, slots: int, half: str, layer: int, dtype: torch.dtype, width: int, device: str
) -> KVSource:
    pad = rng.choice([0, 0, 3])
    tensor = torch.zeros(slots, width + pad, dtype=torch.uint8, device=device)
    if dtype != torch.uint8:
        tensor = torch.zeros(slots, width + pad, dtype=torch.float32, device=device).to(dtype)
    size = tensor.element_size()
    return KVSource(
        tensor, half, layer, chunk_bytes=width * size, slot_stride_bytes=(width + pad) * size,
        dtype=None if dtype == torch.uint8 else dtype, role=Role.SCALE if width * size < 8 else Role.DATA,
    )  # fmt: skip


def _heads_first(rng: random.Random, slots: int, half: str, layer: int, device: str) -> KVSource:
    heads, page, dim = rng.choice([2, 3]), 4, rng.choice([4, 6, 8])
    pages = -(-slots // page)
    tensor = torch.zeros(pages, heads, page, dim, dtype=torch.float32, device=device)
    return KVSource(
        tensor, half, layer, chunk_bytes=dim * 4, slot_stride_bytes=dim * 4, page_size=page,
        page_stride_bytes=heads * page * dim * 4, chunks=heads, chunk_stride_bytes=page * dim * 4, dtype=torch.float32,
        present=rng.choice([None, 3]),
    )  # fmt: skip
