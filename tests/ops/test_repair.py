"""What the op ``repair`` writes into an engine's memory: the one word that it can prove, on both back ends."""

import random

import pytest
import torch
from ops.scenario import differences, twin
from torch import Tensor

from canary_core import CanaryConfig, KVSource, Region
from canary_core.ops import hashing
from canary_core.ops.backends import torch_backend, triton_backend
from canary_core.ops.repair_rows import REPAIR_WORDS, RepairOutcome, RepairWord, is_flip
from canary_core.ops.state import RegionState, Shared
from canary_core.ops.torch.repair import BITS_32
from canary_core.records import POSITION, STATES, STEP_WRITTEN, Clock, State

BACKENDS = [
    pytest.param(torch_backend, "cpu", id="torch"),
    pytest.param(triton_backend, "cpu", id="triton"),
    pytest.param(triton_backend, "cuda", id="triton-cuda", marks=pytest.mark.gpu),
]
SLOTS, STEP = 32, 9
PARKED = int(State.WRITTEN | State.PARKED)
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
)  # fmt: skip


class Pool:
    """Random bytes of all types: of each a source of rows, and one of heads-first pages of four slots. All slots are
    parked, slot ``s`` with position ``s``."""

    def __init__(self, seed: int, device: str) -> None:
        draw, made = random.Random(seed), torch.Generator().manual_seed(seed)
        self.pools: list[Tensor] = []
        sources = []
        for layer, dtype in enumerate(DTYPES):
            head, heads = 4 * draw.choice([4, 8, 17, 600]), draw.choice([2, 3])
            for half in "kv":
                shape = (SLOTS, heads * head) if half == "k" else (SLOTS // 4, heads, 4, head)
                pool = torch.randint(0, 256, shape, dtype=torch.uint8, generator=made).to(device)
                places = dict(chunk_bytes=heads * head, slot_stride_bytes=heads * head)
                if half == "v":
                    places = dict(
                        page_size=4, page_stride_bytes=heads * 4 * head, slot_stride_bytes=head, chunks=heads,
                        chunk_stride_bytes=4 * head, chunk_bytes=head,
                    )  # fmt: skip
                self.pools.append(pool)
                sources.append(KVSource(pool.view(dtype), half, layer, dtype=dtype, **places))
        config = CanaryConfig(repair=True)
        self.state = RegionState(
            Region("r", SLOTS, tuple(sources)), 0, Shared.allocate(config, torch.device(device)), config
        )
        torch_backend().baseline(self.state)
        self.state.records[:, POSITION] = torch.arange(SLOTS, device=device, dtype=torch.int32) * STATES + PARKED
        self.state.records[:, STEP_WRITTEN] = 7
        self.state.shared.clock[Clock.NEXT] = STEP

    def slot(self, column: int, slot: int) -> Tensor:
        """The bytes of a slot: a view, ``[chunks, bytes]``."""
        pool = self.pools[column]
        return pool[slot][None] if pool.dim() == 2 else pool[slot // 4, :, slot % 4]

    def found(self, column: int, slot: int) -> int:
        """The fingerprint of what is there now, worked out on the host."""
        words = self.slot(column, slot).cpu().contiguous().view(torch.int32).flatten().long() & BITS_32
        seeds = self.state.sources.fingerprint_keys
        salt = hashing.salts(column + 1, seed=seeds.of_sources)[column]
        return hashing.signed(int((words * hashing.keys(len(words), seed=seeds.of_words)).sum()) + int(salt))

    def row(self, column: int, slot: int, **other: int) -> list[int]:
        """What the host asks for after a finding."""
        row = [0] * REPAIR_WORDS
        stored = int(self.state.fingerprints[slot, column])
        row[: RepairWord.OUTCOME] = [slot, column, stored, self.found(column, slot), 7, slot]
        for name, value in other.items():
            row[RepairWord[name]] = value
        return row

    def rows(self, rows: list[list[int]]) -> Tensor:
        """On the device."""
        return torch.tensor(rows, dtype=torch.int64, device=self.state.records.device).view(-1, REPAIR_WORDS)

    def flip(self, column: int, slot: int, byte: int, bits: int) -> None:
        """Of one byte of a slot."""
        chunks = self.slot(column, slot)
        chunks[byte // chunks.shape[1], byte % chunks.shape[1]] ^= bits


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_random_flips_of_all_types_are_put_back(backend, device):
    """A random bit of a random byte, 200 times: all bytes are what they were; the row has the word, and nothing else of
    ours has changed."""
    draw, repaired = random.Random("flips"), 0
    for seed in range(4):
        pool = Pool(seed, device)
        intact, ours = [p.clone() for p in pool.pools], twin(pool.state)
        for _ in range(5):
            asked, words = [], []
            for place in draw.sample(range(len(pool.pools) * SLOTS), 10):
                column, slot = divmod(place, SLOTS)
                byte = draw.randrange(pool.slot(column, slot).numel())
                pool.flip(column, slot, byte, 1 << draw.randrange(8))
                asked.append(pool.row(column, slot))
                words.append(byte // 4)
            rows = pool.rows(asked)
            backend().repair(pool.state, rows)
            assert all(torch.equal(now, then) for now, then in zip(pool.pools, intact, strict=True))
            told = rows.tolist()
            assert {row[RepairWord.OUTCOME] for row in told} == {RepairOutcome.REPAIRED}
            assert [row[RepairWord.WORD] for row in told] == words
            assert {row[RepairWord.STEP] for row in told} == {STEP}
            assert {(row[RepairWord.OLD] ^ row[RepairWord.DAMAGED]).bit_count() for row in told} == {1}
            repaired += len(told)
        assert differences(ours, pool.state, 0) == []
    assert repaired == 200


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ("live", RepairOutcome.LIVE),
        ("freed", RepairOutcome.MOVED_ON),
        ("unknown", RepairOutcome.MOVED_ON),
        ("written", RepairOutcome.MOVED_ON),
        ("position", RepairOutcome.MOVED_ON),
        ("fingerprint", RepairOutcome.MOVED_ON),
        ("changed", RepairOutcome.CHANGED),
        ("two words", RepairOutcome.UNCLEAR),
        ("many bits", RepairOutcome.UNCLEAR),
        ("row", RepairOutcome.UNCLEAR),
    ],
)
def test_what_is_not_proven_is_not_written(backend, device, change, outcome):
    """A request has the slot, it is another's by now, or more than a word has changed: not a byte."""
    pool = Pool(5, device)
    column, slot = 3, 6
    pool.flip(column, slot, 21, 1)
    if change == "two words":
        pool.flip(column, slot, 40, 1)
    elif change == "many bits":
        pool.flip(column, slot, 20, 7)
        pool.flip(column, slot, 22, 7)
    elif change == "row":
        pool.slot(column, slot).random_(0, 256)
    asked = pool.row(column, slot)
    word = {"live": State.WRITTEN, "freed": PARKED | State.FREED, "unknown": State.UNKNOWN | State.PARKED}.get(change)
    if word is not None:
        pool.state.records[slot, POSITION] = slot * STATES + int(word)
    elif change == "written":
        pool.state.records[slot, STEP_WRITTEN] = 8
    elif change == "position":
        pool.state.records[slot, POSITION] += STATES
    elif change == "fingerprint":
        pool.state.fingerprints[slot, column] += 2
    elif change == "changed":
        pool.flip(column, slot, 44, 8)
    before = [p.clone() for p in pool.pools]
    rows = pool.rows([asked])
    backend().repair(pool.state, rows)
    assert all(torch.equal(now, then) for now, then in zip(pool.pools, before, strict=True))
    assert rows[0, RepairWord.OUTCOME :].tolist() == [outcome, -1, 0, 0, STEP, 0]


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_what_a_copy_or_a_load_brought_is_put_back(backend, device):
    """It is judged by what was recorded of its source."""
    pool = Pool(6, device)
    pool.state.records[4, POSITION] += int(State.ARRIVED)
    before = pool.pools[2].clone()
    pool.flip(2, 4, 3, 0xFF)
    rows = pool.rows([pool.row(2, 4)])
    backend().repair(pool.state, rows)
    assert int(rows[0, RepairWord.OUTCOME]) == RepairOutcome.REPAIRED
    assert torch.equal(pool.pools[2], before)


def test_nothing_is_asked_for():
    """A warm-up: no row."""
    pool = Pool(0, "cpu")
    for backend in (torch_backend(), triton_backend()):
        backend.repair(pool.state, pool.rows([]))


def test_two_words_that_look_like_one_are_rare_and_told_apart():
    """Of random changes of two words none is taken for a flip of one."""
    words, generator = 512, torch.Generator().manual_seed(3)
    keys = hashing.keys(words)
    inverse = hashing.inverse(keys)
    assert bool((keys * inverse == 1).all())
    for _ in range(2000):
        now = torch.randint(0, 1 << 32, (words,), generator=generator)
        before = now.clone()
        pair = torch.randperm(words, generator=generator)[:2]
        before[pair] ^= 1 << torch.randint(0, 32, (2,), generator=generator)
        old = now + ((before - now) * keys).sum() * inverse
        fits = ((old >= 0) & (old <= BITS_32)).nonzero()[:, 0].tolist()
        assert not [i for i in fits if is_flip(int(old[i]) ^ int(now[i]))]
