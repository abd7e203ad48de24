"""Many readers of one prefix: a long forward looks at shared slots once, and finds what a check row by row finds."""

import random
from collections import Counter as Counts
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.scenario import differences, ring_rows, twin

from canary_core import BatchView, CanaryConfig, KVSource, Region, RegionKind, SlotTable
from canary_core.ops import hashing, readers
from canary_core.ops.backends import torch_backend, triton_backend
from canary_core.ops.kernels import check as check_kernels
from canary_core.ops.state import RegionState, Shared
from canary_core.ops.torch import check as check_reference
from canary_core.ops.torch import readers as readers_reference
from canary_core.records import POSITION, PREFIX_HASH, STATES, TOKEN, Counter, Cursor, Kind, Row, State

TILE = 8
ALONE = 1 << 20
"""So many spans that no forward has them: each row looks at all of its slots."""


@pytest.fixture(autouse=True)
def small_spans(monkeypatch):
    """Tiles and spans so small that every batch has several."""
    set_spans(monkeypatch, spans=1, span_tiles=2)


def set_spans(monkeypatch, spans: int, span_tiles: int) -> None:
    """Both back ends take other spans from now on; not the launches that a state already has."""
    monkeypatch.setattr(check_kernels, "TILE", TILE)
    monkeypatch.setattr(check_reference, "CHECK_TILE", TILE)
    for module in (readers, readers_reference):
        monkeypatch.setattr(module, "SPANS", spans)
        monkeypatch.setattr(module, "SPAN_TILES", span_tiles)


@dataclass
class Readers:
    """Requests of which most begin as an earlier one does, in the same slots: ``parents`` has for each the request that
    it forks from, -1 for none, and how many units of slots they share. All are recorded."""

    parents: list[tuple[int, int]]
    lengths: list[int]
    page_size: int = 1
    group: int = 1
    anchors: bool = False
    kind: torch.dtype = torch.int32
    mapped: bool = False
    ragged: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        rows, unit = len(self.lengths), max(self.page_size, self.group)
        width = max(self.lengths) + 2 * unit
        units = -(-width // unit)
        self.tokens = torch.randint(0, 50, (rows, units * unit))
        numbers = torch.randperm(rows * units) + 1
        self.units = numbers.view(rows, units)
        self.roots = list(range(rows))
        for row, (parent, shared) in enumerate(self.parents):
            if parent >= 0:
                self.roots[row] = self.roots[parent]
                self.units[row, :shared] = self.units[parent, :shared]
                self.tokens[row, : shared * unit] = self.tokens[parent, : shared * unit]
        each = unit // self.page_size
        entries = (self.units[:, :, None] * each + torch.arange(each)).reshape(rows, -1)
        self.entries = entries.to(self.kind).to(self.device)
        numbers_of_slots = (rows * units + 2) * unit
        slots = numbers_of_slots // self.group
        source = KVSource(torch.zeros(slots, 1, device=self.device), "k", 0, 4, 4)
        region = Region(
            "r", slots, (source,), kind=RegionKind.COMPRESSED if self.group > 1 else RegionKind.FULL,
            tokens_per_slot=self.group, null_slot=0,
            slot_map=torch.randperm(slots, device=self.device) if self.mapped else None,
        )  # fmt: skip
        config = CanaryConfig(bytes="off", ring_rows=8192)
        self.state = RegionState(region, 0, Shared.allocate(config, torch.device(self.device)), config)
        for row, (_, shared) in enumerate(self.parents):
            first = min(shared * unit, self.lengths[row])
            self.forward(self.batch([row], [first], [self.lengths[row] - first]))
        assert ring_rows(self.state) == [] or self.mapped

    def batch(self, rows: list[int], prefix: list[int], new: list[int]) -> BatchView:
        """A forward of some of the requests."""
        index = torch.tensor(rows, device=self.device)
        entries = self.entries
        if self.ragged:
            index, entries = index * entries.shape[1], entries.as_strided((1, entries.numel()), (1, 1))
        written = zip(rows, prefix, new, strict=True)
        tokens = torch.cat([self.tokens[row, first : first + count] for row, first, count in written])
        anchors = torch.tensor([hashing.signed(77 + self.roots[row]) for row in rows], device=self.device)
        return BatchView(
            prefix_lens=torch.tensor(prefix, dtype=torch.int32, device=self.device),
            new_lens=torch.tensor(new, dtype=torch.int32, device=self.device),
            token_ids=tokens.to(self.device),
            writers=torch.tensor(rows, dtype=torch.int32, device=self.device),
            tables={"r": SlotTable(entries, index, self.page_size)},
            anchors=anchors if self.anchors else None,
        )

    def forward(self, batch: BatchView) -> None:
        """Checks and records a forward by the reference."""
        self.state.require_capacity(batch)
        for op in ("check", "record"):
            getattr(torch_backend(), op)(self.state, batch, batch.tables["r"])

    def slot(self, row: int, token: int) -> int:
        """The slot of a request's token."""
        number = int(self.entries[row, token // self.page_size]) * self.page_size + token % self.page_size
        number //= self.group
        slot_map = self.state.region.slot_map
        return number if slot_map is None else int(slot_map[number])

    def decode(self) -> BatchView:
        """A forward that computes one token of each request, and reads all others."""
        rows = list(range(len(self.lengths)))
        return self.batch(rows, self.lengths, [1] * len(rows))


def checked(readers: Readers, batch: BatchView) -> RegionState:
    """The state after the kernel's check of ``batch``, equal to the reference's."""
    table = batch.tables["r"]
    readers.state.require_capacity(batch)
    reference, kernel = twin(readers.state), twin(readers.state)
    torch_backend().check(reference, batch, table)
    triton_backend().check(kernel, batch, table)
    assert differences(reference, kernel, batch.tokens) == []
    return kernel


def gained(readers: Readers, after: RegionState, counter: int) -> int:
    """How far a check moved a counter."""
    return int(after.shared.counters[counter] - readers.state.shared.counters[counter])


def random_readers(seed: int, device: str = "cpu") -> tuple[Readers, BatchView]:
    """Trees of requests with faults in records, tables, tokens and identities, and a forward of them."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, page_size, group = rng.choice([2, 3, 6, 9]), rng.choice([1, 4, 16]), rng.choice([1, 1, 2])
    unit = max(page_size, group)
    lengths = [rng.randint(1, 110) for _ in range(rows)]
    parents = [(-1, 0)]
    for row in range(1, rows):
        parent = rng.randrange(row)
        most = min(lengths[parent], lengths[row]) // unit
        shared = rng.choice([most, most, rng.randint(0, most)])
        parents.append((parent, shared) if rng.random() < 0.85 else (-1, 0))
    readers = Readers(
        parents, lengths, page_size, group, anchors=rng.random() < 0.4, kind=rng.choice([torch.int32, torch.int64]),
        mapped=rng.random() < 0.2, ragged=rng.random() < 0.3, device=device,
    )  # fmt: skip
    state = readers.state
    for _ in range(rng.choice([0, 1, 3, 9])):
        row = rng.randrange(rows)
        slot = readers.slot(row, rng.randrange(lengths[row]))
        word = rng.choice([TOKEN, POSITION, PREFIX_HASH, PREFIX_HASH + 1])
        if rng.random() < 0.5:
            state.records[slot, word] ^= 1 << rng.randrange(31)
        elif rng.random() < 0.3:
            state.records[slot, PREFIX_HASH : PREFIX_HASH + 2] = 0
        else:
            state.records[slot, POSITION] = state.records[slot, POSITION] // STATES * STATES + rng.randrange(STATES)
    for _ in range(rng.choice([0, 0, 1, 3])):
        row, column = rng.randrange(rows), rng.randrange(readers.entries.shape[1])
        other = readers.entries[rng.randrange(rows), column]
        readers.entries[row, column] = rng.choice([other, -1, 0, 5, 10**6])
    if rng.random() < 0.1:
        state.cursors[Cursor.CHECK_TILES] = 5
    batch = readers.decode()
    batch.prefix_lens.sub_(torch.tensor([rng.choice([0, 0, 1, 9]) for _ in range(rows)], device=device))
    writers = torch.tensor([rng.choice([row, row, row + 100, -1]) for row in range(rows)], device=device)
    anchors, expected = batch.anchors, None
    if anchors is not None and rng.random() < 0.5:
        anchors[rng.randrange(rows)] += 1
    if rng.random() < 0.4:
        expected = readers.tokens[:, : rng.choice([30, 200])].int().to(device)
        for _ in range(rng.choice([0, 1, 2])):
            expected[rng.randrange(rows), rng.randrange(expected.shape[1])] = rng.choice([-1, 3])
    return readers, replace(batch, writers=writers.int(), anchors=anchors, expected_tokens=expected)


def equal_alone(seed: int, monkeypatch, device: str = "cpu") -> RegionState:
    """The state after the check of `random_readers`, which is that of a check in which each row looks by itself."""
    readers, batch = random_readers(seed, device)
    set_spans(monkeypatch, 1, random.Random(seed).choice([2, 8]))
    shared = checked(readers, batch)
    set_spans(monkeypatch, ALONE, 8)
    alone = checked(readers, batch)
    assert int(alone.shared.counters[Counter.SHARED_SLOTS]) == 0
    found = int(shared.shared.counters[Counter.SHARED_SLOTS])
    shared.shared.counters[Counter.SHARED_SLOTS] = 0
    assert differences(shared, alone, batch.tokens) == []
    shared.shared.counters[Counter.SHARED_SLOTS] = found
    return shared


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6))
def test_findings_are_those_of_a_check_row_by_row(seed, monkeypatch):
    """Whatever tables have in common and whatever is wrong, with slots, tables, tokens or identities."""
    equal_alone(seed, monkeypatch)


def test_rows_that_follow_others_and_have_findings_are_among_them(monkeypatch):
    """The fuzz above is not vacuous: over fixed seeds most kinds are found, of slots that several rows read, and slots
    are shared."""
    kinds: Counts[int] = Counts()
    shared = unknown = 0
    for seed in range(24):
        state = equal_alone(seed, monkeypatch)
        counters = state.shared.counters
        if int(counters[Counter.SHARED_SLOTS]):
            shared += 1
            unknown += int(counters[Counter.UNKNOWN_SLOTS])
            rows = Counts((row[Row.KIND - 1], row[Row.SLOT - 1]) for row in ring_rows(state))
            kinds += Counts(kind for (kind, _), readers in rows.items() if readers > 1)
    assert shared > 8
    assert unknown > 0
    assert {Kind.FREED, Kind.POSITION, Kind.PREFIX, Kind.UNWRITTEN} <= set(kinds)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_findings_are_those_of_a_check_row_by_row_on_the_gpu(seed, monkeypatch):
    """The same, compiled."""
    equal_alone(seed, monkeypatch, "cuda")


def test_slots_of_one_prefix_are_left_to_the_first_reader():
    """Of four readers of 41 slots three leave the two whole spans of 16 to the first; all slots count as checked."""
    readers = Readers([(-1, 0), *[(0, 40)] * 3], [41] * 4)
    after = checked(readers, readers.decode())
    assert gained(readers, after, Counter.SHARED_SLOTS) == 3 * 2 * 16
    assert gained(readers, after, Counter.CHECKED_SLOTS) == 4 * 41


def test_a_broken_slot_of_a_shared_prefix_is_told_for_each_reader():
    """With the reader's own number. What is unknown counts for each of them, too."""
    readers = Readers([(-1, 0), *[(0, 40)] * 3], [41] * 4)
    readers.state.records[readers.slot(0, 5), POSITION] |= int(State.FREED)
    readers.state.records[readers.slot(0, 20), POSITION] |= int(State.UNKNOWN)
    after = checked(readers, readers.decode())
    told = [(row[Row.KIND - 1], row[Row.POSITION - 1], row[Row.WRITER - 1]) for row in ring_rows(after)]
    assert told == [(Kind.FREED, 5, writer) for writer in range(4)]
    assert gained(readers, after, Counter.UNKNOWN_SLOTS) == 4
    assert gained(readers, after, Counter.SHARED_SLOTS) > 0


def test_rows_that_differ_from_their_leader_lead_no_others():
    """Two rows alike, and before them a third that shares their span's last entry only: all look for themselves, and
    each finding is told once for each of them."""
    readers = Readers([(-1, 0), *[(0, 40)] * 2], [41] * 3)
    readers.entries[0, 3] = readers.entries[0, 40]
    readers.state.records[readers.slot(0, 7), POSITION] |= int(State.FREED)
    after = checked(readers, readers.decode())
    assert gained(readers, after, Counter.SHARED_SLOTS) == 2 * 16
    told = Counts((row[Row.KIND - 1], row[Row.WRITER - 1]) for row in ring_rows(after))
    assert [told[Kind.FREED, writer] for writer in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(("token", "left"), [(3, 16), (20, 16), (15, 0), (16, 16)])
def test_a_row_with_one_other_entry_looks_for_itself(token, left):
    """Also where the entry is not the span's last one, by which the leader is found. The entry before a span belongs to
    it, since the span's first hash continues the one there."""
    readers = Readers([(-1, 0), (0, 40)], [41, 41])
    readers.entries[1, token] = readers.entries[1, 40]
    after = checked(readers, readers.decode())
    assert gained(readers, after, Counter.SHARED_SLOTS) == left
    assert {row[Row.WRITER - 1] for row in ring_rows(after)} == {1}
    assert (Kind.POSITION, token) in {(row[Row.KIND - 1], row[Row.POSITION - 1]) for row in ring_rows(after)}


def test_another_identity_looks_for_itself_where_it_matters():
    """A reader with another anchor, of another adapter, is told at position 0; what comes after is compared with what
    comes before, as in every row."""
    readers = Readers([(-1, 0), (0, 40)], [41, 41], anchors=True)
    batch = readers.decode()
    assert batch.anchors is not None
    batch.anchors[1] += 1
    after = checked(readers, batch)
    assert gained(readers, after, Counter.SHARED_SLOTS) == 16
    told = [(row[Row.KIND - 1], row[Row.POSITION - 1], row[Row.WRITER - 1]) for row in ring_rows(after)]
    assert told == [(Kind.PREFIX, 0, 1)]


def test_a_request_with_another_token_of_its_own_looks_for_itself():
    """The same slots are right for one request and wrong for the other. Where both know nothing they are alike."""
    readers = Readers([(-1, 0), (0, 40)], [41, 41])
    own = readers.tokens[:, :41].int()
    own[:, 20] = -1
    own[1, 3] += 1
    after = checked(readers, replace(readers.decode(), expected_tokens=own))
    assert gained(readers, after, Counter.SHARED_SLOTS) == 16
    told = [(row[Row.KIND - 1], row[Row.POSITION - 1], row[Row.WRITER - 1]) for row in ring_rows(after)]
    assert told == [(Kind.TOKEN, 3, 1)]


def test_the_end_of_a_row_is_its_own():
    """A row whose last slot ends a span leads none there, and follows none: its final hash is compared with that of its
    own request. The rows that read on have another leader, which tells for them."""
    readers = Readers([(-1, 0), *[(0, 32)] * 3], [32, 41, 41, 32])
    last = readers.slot(0, 31)
    readers.state.chains[3] = torch.tensor([3 << 32 | 32, 77])
    readers.state.records[last, POSITION] |= int(State.PARKED)
    after = checked(readers, readers.decode())
    assert gained(readers, after, Counter.SHARED_SLOTS) == 3 * 16 + 16
    told = [(row[Row.KIND - 1], row[Row.POSITION - 1], row[Row.WRITER - 1]) for row in ring_rows(after)]
    assert told == [(Kind.PREFIX, 31, 3)]
    readers.state.records[last, POSITION] |= int(State.FREED)
    after = checked(readers, readers.decode())
    told = [(row[Row.KIND - 1], row[Row.POSITION - 1], row[Row.WRITER - 1]) for row in ring_rows(after)]
    assert told == [(Kind.FREED, 31, writer) for writer in range(4)]


def test_short_forwards_budgets_and_windows_share_nothing(monkeypatch):
    """Each row looks at all of its slots: in a forward of few tiles, under a budget, and in a table that is a ring."""
    readers = Readers([(-1, 0), (0, 40)], [41, 41])
    batch = readers.decode()
    assert gained(readers, checked(readers, batch), Counter.SHARED_SLOTS) == 32
    readers.state.cursors[Cursor.CHECK_TILES] = 11
    assert gained(readers, checked(readers, batch), Counter.SHARED_SLOTS) == 0
    readers.state.cursors[Cursor.CHECK_TILES] = 12
    ring = replace(batch.tables["r"], ring_slots=64, stored_tokens=64)
    assert gained(readers, checked(readers, replace(batch, tables={"r": ring})), Counter.SHARED_SLOTS) == 0
    assert gained(readers, checked(readers, batch), Counter.SHARED_SLOTS) == 32
    set_spans(monkeypatch, 7, 2)
    readers.state.launches.clear()
    assert gained(readers, checked(readers, batch), Counter.SHARED_SLOTS) == 0
