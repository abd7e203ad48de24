"""What a forward stores once more, beside the slots of its table: a recurrent state as of a token inside of it."""

from dataclasses import replace

import pytest
import torch

from canary_adapters import Part, ragged_table, ring_table, row_source, slot_table
from canary_core import AttachError, BatchView, Canary, CanaryConfig, Region, RegionKind
from canary_core.batch import StateCheckpoints
from canary_core.ops import hashing
from canary_core.ops.backends import torch_backend, triton_backend
from canary_core.plugins import private_hooks
from canary_core.records import POSITION, PREFIX_HASH, STATES, STEP_WRITTEN, TOKEN, WRITER, Phase, State
from canary_core.testing import Findings

ROWS = 3
OWN = (2, 4, 7)
NONE = (-1, -1, -1)


class Engine:
    """Three requests, whose states every forward rewrites; now and then it keeps one as of an earlier token."""

    def __init__(self, device: str = "cpu", **settings: object) -> None:
        self.findings = Findings()
        self.device = device
        self.states = torch.zeros(12, 32, device=device)
        self.lengths = torch.zeros(ROWS, dtype=torch.int64)
        self.tokens = [[] for _ in range(ROWS)]
        region = Region("mamba", 12, (row_source(self.states, Part("ssm", 0)),), RegionKind.STATE, null_slot=0)
        config = CanaryConfig.load(**{"state_interval": 64, "scrub_budget": "1MiB", **settings})
        self.canary = Canary([region], config, hooks=private_hooks(self.findings))

    @property
    def found(self):
        """What was found so far."""
        return [(v.kind.name, v.slot) for v in self.findings.violations]

    def step(self, new: int = 1, kept=NONE, back: int = 0, stores: bool = True, copies=None) -> None:
        """A forward of ``new`` tokens a row, which keeps states as of ``back`` tokens before the last in ``kept``.
        ``copies``: the slots that it says to copy there."""
        news = torch.full((ROWS,), new)
        tokens = torch.randint(0, 1 << 30, (ROWS, new))
        for row, mine in zip(self.tokens, tokens.tolist(), strict=True):
            row += mine
        table = ring_table(slot_table(torch.tensor([[slot] for slot in OWN], device=self.device)), 1)
        slots, positions = torch.tensor(kept), self.lengths + new - 1 - back
        made = StateCheckpoints(slots.to(self.device), positions.to(self.device), copied=copies is not None)
        table = replace(table, checkpoints=made)
        self.begin(news, tokens.flatten(), table)
        if copies is not None:
            self.states[[slot for slot in kept if slot > 0]] = self.states[list(copies)]
        elif stores:
            self.states[[slot for slot in kept if slot > 0]] += torch.randn(32).to(self.device)
        self._end(news)

    def reuse(self, row: int, length: int, slot: int) -> None:
        """Another request goes on from a kept state, as if it were ``row``'s first ``length`` tokens."""
        table = replace(ragged_table(torch.tensor([slot, 9]), torch.tensor([1 - length])), stored_tokens=1)
        batch = BatchView(
            prefix_lens=torch.tensor([length]),
            new_lens=torch.tensor([1]),
            token_ids=torch.tensor([5]),
            writers=torch.tensor([30]),
            tables={"mamba": table},
            expected_tokens=torch.tensor([[*self.tokens[row][:length], 5]]),
        )
        self.canary.step.before(batch)
        self.states[9] += torch.randn(32)
        self.canary.step.after(batch)
        self.canary.step.end()
        self.canary.drain()

    def begin(self, news, tokens, table) -> None:
        self._batch = BatchView(
            prefix_lens=self.lengths.to(self.device, copy=True),
            new_lens=news.to(self.device),
            token_ids=tokens.to(self.device),
            writers=torch.arange(ROWS, device=self.device),
            tables={"mamba": table},
        )
        self.canary.step.before(self._batch)
        self.states[list(OWN)] += torch.randn(ROWS, 32).to(self.device)

    def _end(self, news) -> None:
        self.canary.step.after(self._batch)
        self.canary.step.end()
        self.canary.drain()
        self.lengths += news


@pytest.fixture
def engine():
    """One with the reference back end, whose decodes are hardly ever looked at."""
    engine = Engine()
    yield engine
    engine.canary.close()


def test_a_kept_state_is_known_as_of_its_token(engine):
    """Token, position, prefix, writer and bytes, also where the forward itself wasn't looked at."""
    engine.step(new=4)
    engine.step(new=6, kept=(8, -1, 10), back=2)
    engine.step(kept=(-1, 11, -1))
    state = engine.canary.states["mamba"]
    words = state.records[:, POSITION]
    for slot, row, length in ((8, 0, 8), (10, 2, 8), (11, 1, 11)):
        tokens = torch.tensor(engine.tokens[row][:length])
        hash = hashing.anchor() + hashing.mix(tokens, torch.arange(length)).sum()
        record = state.records[slot]
        assert record[TOKEN] == tokens[-1]
        assert words[slot] == (length - 1) * STATES + State.WRITTEN
        assert record[PREFIX_HASH : PREFIX_HASH + 2].view(torch.int64) == hash
        assert (record[WRITER], record[STEP_WRITTEN]) == (row, 2 if length == 8 else 3)
        assert state.fingerprints[slot] != 0
    assert (state.fingerprints[list(OWN)] == 0).all()
    assert (words[[s for s in range(12) if s not in (*OWN, 8, 10, 11)]] == 0).all()
    assert engine.found == []


def test_a_kept_state_is_what_whoever_goes_on_from_it_wants(engine):
    """Nothing is found where it is reused in its place, and what is wrong with it elsewhere."""
    engine.step(new=10, kept=(8, 10, -1), back=4)
    engine.reuse(row=0, length=6, slot=8)
    assert engine.found == []
    assert engine.canary.stats()["unknown_slots"] == 0
    engine.reuse(row=0, length=5, slot=8)
    engine.reuse(row=0, length=6, slot=10)
    assert engine.found == [("POSITION", 8), ("TOKEN", 10)]


def test_a_flip_in_a_kept_state_is_found_by_the_scrub(engine):
    """Long after the forward that kept it."""
    engine.step(new=10, kept=(8, -1, -1), back=4)
    engine.step()
    engine.states[8, 3] += 1
    for _ in range(12):
        engine.step()
    assert engine.found == [("BYTES", 8)]


def test_a_state_that_was_not_kept_is_a_lost_write(engine):
    """The engine says that it kept one, and the slot has the bytes of the one before."""
    engine.step(new=10, kept=(8, -1, -1), back=4)
    engine.step(kept=(8, -1, -1), stores=False)
    assert engine.found == [("LOST_WRITE", 8)]


@pytest.mark.parametrize("copies", [(2, 7), (2, 4)])
def test_a_kept_state_that_is_a_copy_has_the_bytes_of_its_source(engine, copies):
    """Of a decode, whether it was looked at or not: the state of another row that gets there is found at once."""
    engine.step(new=4)
    engine.step(kept=(8, -1, 10), copies=copies)
    assert engine.found == ([] if copies == (2, 7) else [("BYTES", 10)])
    for found in engine.findings.violations:
        assert (found.phase, found.source, found.position) == (Phase.EVENT, "ssm.0", None)
        assert found.stored_position == 4
    state = engine.canary.states["mamba"]
    assert state.fingerprints[8] == state.fingerprints[2] != 0
    for _ in range(3):
        engine.step()
    assert len(engine.found) == (0 if copies == (2, 7) else 1)


def test_rows_that_keep_nothing_that_is_new_are_left_out(engine):
    """No slot, the null slot, one beyond the pool, and a token of the prefix."""
    engine.step(new=4)
    before = engine.canary.states["mamba"].records.clone()
    engine.step(new=2, kept=(0, 99, -1), stores=False)
    engine.step(new=2, kept=(8, 10, 11), back=3, stores=False)
    records = engine.canary.states["mamba"].records
    others = [slot for slot in range(12) if slot not in OWN]
    assert torch.equal(records[others], before[others])
    assert engine.found == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_keep_what_the_reference_keeps(device):
    """Both back ends end in the same memory of ours."""
    ends = []
    for name, where, backend in (("torch", "cpu", torch_backend()), ("triton", device, triton_backend())):
        torch.manual_seed(0)
        engine = Engine(where, backend=name)
        try:
            assert engine.canary.slots.workspace.backend.name == backend.name
            engine.step(new=5)
            engine.step(new=7, kept=(8, -1, 10), back=3)
            engine.step(kept=(-1, 11, -1))
            engine.step(kept=(8, -1, 10), copies=(2, 7))
            state = engine.canary.states["mamba"]
            memory = (state.records, state.fingerprints, state.chains, state.scratch.claims)
            ends.append([tensor.cpu() for tensor in memory])
            assert engine.found == []
        finally:
            engine.canary.close()
    for reference, kernels in zip(*ends, strict=True):
        assert torch.equal(reference, kernels)


def test_as_many_as_rows_are_kept(engine):
    """One entry a row, or the batch is refused."""
    table = ring_table(slot_table(torch.tensor([[2], [4], [7]])), 1)
    four = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(AttachError, match="checkpoints for"):
        engine.begin(
            torch.ones(ROWS, dtype=torch.int64),
            torch.zeros(3, dtype=torch.int64),
            replace(table, checkpoints=StateCheckpoints(four, four)),
        )
