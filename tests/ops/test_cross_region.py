"""What one region knows of a sequence, another that has it elsewhere must agree with."""

import pytest
import torch

from canary_adapters import Part, ring_table, row_source, slot_table
from canary_core import BatchView, Canary, CanaryConfig, Region, RegionKind
from canary_core.ops.cross_region import expect_sequences
from canary_core.plugins import private_hooks
from canary_core.records import CHAINS
from canary_core.testing import Findings

TOKENS = ([11, 12, 13, 99], [21, 22, 23, 99])


class Engine:
    """KV of tokens, and a state for each of two requests: slots 1 to 4 and 5 to 8, states 1 and 2."""

    def __init__(self) -> None:
        self.findings = Findings()
        self.kv, self.states = torch.zeros(16, 32), torch.zeros(6, 32)
        regions = [
            Region("full", 16, (row_source(self.kv, Part("kv", 0)),), null_slot=0),
            Region("mamba", 6, (row_source(self.states, Part("ssm", 0)),), RegionKind.STATE, null_slot=0),
        ]
        self.canary = Canary(regions, CanaryConfig.load(), hooks=private_hooks(self.findings))
        self.forward(
            torch.arange(1, 9).view(2, 4), torch.tensor([[1], [2]]), ([0, 0], [4, 4]), [*TOKENS[0], *TOKENS[1]]
        )

    @property
    def found(self):
        """What was found so far."""
        return [(v.kind.name, v.region, v.slot) for v in self.findings.violations]

    def forward(self, entries, states, lengths, tokens, writers=(0, 1)) -> None:
        """``lengths``: of prefixes, and of what is new."""
        prefixes, news = (torch.tensor(numbers) for numbers in lengths)
        batch = BatchView(
            prefix_lens=prefixes,
            new_lens=news,
            token_ids=torch.tensor(tokens),
            writers=torch.tensor(writers),
            tables={"full": slot_table(entries), "mamba": ring_table(slot_table(states), 1)},
        )
        self.canary.step.before(batch)
        for row, (prefix, new) in enumerate(zip(*lengths, strict=True)):
            self.kv[entries[row, prefix : prefix + new]] += torch.randn(new, 32)
        self.states[states[:, 0]] += torch.randn(len(states), 32)
        self.canary.step.after(batch)
        self.canary.step.end()
        self.canary.drain()

    def go_on(self, state: int, writer: int = 5) -> None:
        """A new request goes on from the first one's KV, and from a state."""
        entries = torch.tensor([[1, 2, 3, 4, 9]])
        known = self.canary.states
        row = {"lengths": torch.tensor([4]), "writers": torch.tensor([writer])}
        expect_sequences(known["mamba"], known["full"], entries[:, 3], **row)
        self.forward(entries, torch.tensor([[state]]), ([4], [1]), [50], (writer,))


@pytest.fixture
def engine():
    """After the prefills of the two requests."""
    engine = Engine()
    yield engine
    engine.canary.close()


def test_a_state_of_the_same_tokens_raises_nothing(engine):
    """Whoever goes on from KV and state of one sequence."""
    engine.go_on(state=1)
    assert engine.found == []


def test_a_state_of_another_sequence_is_found(engine):
    """It is as long and ends with the same token."""
    engine.go_on(state=2)
    assert engine.found == [("PREFIX", "mamba", 2)]


def test_what_is_not_known_is_not_expected(engine):
    """Of KV that arrived without records, of nobody, of an empty prefix, of a slot that is none: nothing changes."""
    known = engine.canary.states
    before = known["mamba"].chains.clone()
    engine.canary.slots.forget("full", torch.tensor([4]))
    slots, lengths = torch.tensor([4, 8, 8, 99, 8]), torch.tensor([4, 4, 0, 4, 3])
    writers = torch.tensor([5, -1, 5, 6, 7])
    expect_sequences(known["mamba"], known["full"], slots, lengths=lengths, writers=writers)
    assert torch.equal(known["mamba"].chains, before)


def test_only_rows_that_are_sure_are_expected(engine):
    """Beside others, one of whom has the same entry in the table of ends."""
    known = engine.canary.states
    before = known["mamba"].chains.clone()
    slots, lengths = torch.tensor([8, 8, 3]), torch.tensor([3, 4, 3])
    writers = torch.tensor([6, CHAINS + 6, 7])
    expect_sequences(known["mamba"], known["full"], slots, lengths=lengths, writers=writers)
    changed = (known["mamba"].chains != before).any(1).nonzero()[:, 0]
    assert changed.tolist() == [6, 7]
    assert known["mamba"].chains[[6, 7], 0].tolist() == [(CHAINS + 6) << 32 | 4, 7 << 32 | 3]
