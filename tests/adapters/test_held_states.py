"""Copies of recurrent states for a second computation: bit for bit from strided memory, for the right one only."""

from collections.abc import Iterator

import pytest
import torch

from canary_adapters import BlockGroup, HeldStates, Part, row_source
from canary_adapters.held_states import RecomputeBegun
from canary_core import Canary, CanaryConfig, Region, RegionKind

GROUP = 1
HELD = ((), (3,))
OWN = ((), (5,))
"""Blocks of two groups, of which the second one has states."""


@pytest.fixture
def states() -> Iterator[tuple[torch.Tensor, torch.Tensor, HeldStates]]:
    """Two states a layer, as vLLM has them in one piece of memory for each block; and the copies."""
    memory = torch.randn(8, 200)
    conv, ssm = memory[:, :96].view(8, 2, 48), memory[:, 96:192].view(8, 4, 24)
    sources = (row_source(conv, Part("conv", 0)), row_source(ssm, Part("ssm", 0)))
    canary = Canary(
        [Region("state", 8, sources, RegionKind.STATE, null_slot=0)], CanaryConfig.load(silence_s=0, bytes="off")
    )
    yield conv, ssm, HeldStates(canary, [BlockGroup("state", GROUP, 1)])
    canary.close()


def test_a_copy_has_what_the_request_had_when_it_was_taken(states):
    """It has gone on since; the second computation is in its own slot."""
    conv, ssm, held = states
    before = conv[3].clone(), ssm[3].clone()
    held.hold(RecomputeBegun("again 1", HELD))
    conv[3], ssm[3] = 0, 0
    ((region, (slot, copied)),) = held.take("again 1", OWN).items()
    assert (region, slot.tolist(), copied.slots.tolist()) == ("state", [5], [0])
    assert all(torch.equal(source.tensor[0], one) for source, one in zip(copied.sources, before, strict=True))
    assert held.take("again 1", OWN) == {}


def test_a_copy_is_for_one_computation_alone(states):
    """What is told of an earlier one gives it up no more than it is handed out for another."""
    _, _, held = states
    held.hold(RecomputeBegun("again 2", HELD))
    held.forget("again 1")
    assert held.take("again 1", OWN) == {}
    assert held.take("again 2", OWN)
    held.hold(RecomputeBegun("again 3", HELD))
    held.forget("again 3")
    assert held.take("again 3", OWN) == {}


def test_without_memory_nothing_is_kept(states, monkeypatch):
    """And nothing is raised."""
    _, _, held = states

    def full(source, slot):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("canary_adapters.held_states._copy", full)
    held.hold(RecomputeBegun("again 1", HELD))
    assert held.take("again 1", OWN) == {}
