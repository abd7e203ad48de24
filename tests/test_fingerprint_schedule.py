"""`FingerprintSchedule`: how often bytes of recurrent states are looked at, which every forward rewrites."""

import pytest
import torch

from canary_adapters import Part, ring_table, row_source, slot_table
from canary_core import BatchView, Canary, CanaryConfig, Region, RegionKind
from canary_core.guard.fingerprint_schedule import FingerprintSchedule
from canary_core.plugins import private_hooks
from canary_core.testing import Findings

ROWS = 3


class Engine:
    """Three requests, whose states every forward rewrites."""

    def __init__(self, interval: int) -> None:
        self.findings = Findings()
        self.states = torch.zeros(9, 32)
        self.lengths = torch.zeros(ROWS, dtype=torch.int64)
        region = Region("mamba", 9, (row_source(self.states, Part("ssm", 0)),), RegionKind.STATE, null_slot=0)
        config = CanaryConfig.load(state_interval=interval, scrub_budget="1MiB")
        self.canary = Canary([region], config, hooks=private_hooks(self.findings))

    @property
    def found(self):
        """What was found so far."""
        return [(v.kind.name, v.phase.name, v.slot) for v in self.findings.violations]

    def step(self, new: int = 1) -> None:
        news = torch.full((ROWS,), new)
        batch = BatchView(
            prefix_lens=self.lengths.clone(),
            new_lens=news,
            token_ids=torch.randint(0, 1 << 30, (ROWS * new,)),
            writers=torch.arange(ROWS),
            tables={"mamba": ring_table(slot_table(torch.tensor([[2], [4], [7]])), 1)},
        )
        self.canary.step.before(batch)
        self.states[[2, 4, 7]] += torch.randn(ROWS, 32)
        self.canary.step.after(batch)
        self.canary.step.end()
        self.canary.drain()
        self.lengths += news


@pytest.fixture
def start():
    """Starts an engine of a given interval."""
    engines = []

    def make(interval: int) -> Engine:
        engines.append(Engine(interval))
        return engines[-1]

    yield make
    for engine in engines:
        engine.canary.close()


@pytest.mark.parametrize("interval", [1, 2, 3, 64])
def test_states_that_are_rewritten_raise_nothing(start, interval):
    """However often bytes are looked at, a state that each forward rewrites is no finding; its mapping is checked."""
    engine = start(interval)
    for step in range(20):
        engine.step(new=5 if step in (0, 7) else 1)
    assert engine.found == []
    stats = engine.canary.stats()
    assert stats["checked_slots"] == 19 * ROWS
    assert stats["unknown_slots"] == 0


def test_a_flip_after_a_step_that_was_looked_at_is_found_before_the_next(start):
    """The next forward's check finds it, before the state is rewritten."""
    engine = start(4)
    while engine.canary.forwards < 8:
        engine.step()
    engine.states[4, 3] += 1
    engine.step()
    assert engine.found == [("BYTES", "PRE_FORWARD", 4)]


def test_a_flip_after_a_prefill_is_found(start):
    """Prefills are always looked at."""
    engine = start(64)
    engine.step(new=4)
    engine.states[7, 0] += 1
    engine.step()
    assert engine.found == [("BYTES", "PRE_FORWARD", 7)]


def test_a_flip_between_two_steps_that_are_not_looked_at_goes_unseen(start):
    """The price of the interval: no finding, and no false one later."""
    engine = start(4)
    while engine.canary.forwards < 6:
        engine.step()
    engine.states[4, 3] += 1
    for _ in range(6):
        engine.step()
    assert engine.found == []


def test_what_a_graph_replays_is_always_looked_at():
    """The host does not know which forward a replay will be."""
    looks = FingerprintSchedule(64)
    batch = BatchView(*(torch.ones(2, dtype=torch.int64) for _ in range(4)), tables={})
    assert looks.begin(batch, captured=False)
    assert not looks.begin(batch, captured=False)
    for _ in range(3):
        assert looks.begin(batch, captured=True)
        assert looks.now
