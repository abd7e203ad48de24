"""Weights on a device: compared beside forwards, and at the end of replayed ones, without a wait and without an
allocation; flipped bits are told."""

import time

import pytest
import torch
from gpu.engine import Run
from gpu.test_graph import ANYWHERE, MODES
from support.weights import Model

from canary_core import Kind


def flip(weight: torch.Tensor, element: int, bit: int) -> None:
    """A bit of a parameter in row-major order; no version counter moves."""
    size = weight.element_size()
    number = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    version, low = weight._version, -(1 << 8 * size - 1)
    weight.data.view(number).view(-1)[element] ^= low if bit == 8 * size - 1 else 1 << bit
    assert weight._version == version


def until_told(run: Run, flips: int) -> list:
    """Forwards until so many findings of weights were told, for a minute at most."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        run.stage(step := run.traffic.next())
        run.issue()
        run.traffic.commit(step)
        found = [v for v in run.found() if v.kind is Kind.WEIGHTS]
        if len(found) >= flips:
            return found
    return [v for v in run.found() if v.kind is Kind.WEIGHTS]


@pytest.mark.parametrize("mode", ANYWHERE)
def test_flips_in_twenty_parameters_are_told_without_a_wait(mode, monkeypatch):
    """Each with its element, nothing else, and nothing before."""
    monkeypatch.setenv("CANARY_WEIGHTS", "on")
    run = Run(*MODES[mode])
    model = Model().to(MODES[mode][0])
    run.canary.guard_weights(model)
    run.clean(12)
    run.audit = mode != "cpu"
    run.clean(40)
    run.audit = False
    assert run.allocated == 0
    rounds = run.canary.scrub_stats()["weights_rounds"]
    assert rounds >= 2
    names = sorted(name for name, one in model.large().items() if one.is_contiguous())[:20]
    for i, name in enumerate(names):
        weight = model.get_parameter(name)
        flip(weight, 11 + i, i % (8 * weight.element_size()))
    found = until_told(run, len(names))
    assert {v.source.split(" (")[0]: v.element for v in found} == {name: 11 + i for i, name in enumerate(names)}
    assert run.canary.stats().get("weights_unsure", 0) == 0


@pytest.mark.parametrize("mode", ANYWHERE)
def test_updates_between_forwards_are_no_alarm(mode, monkeypatch):
    """Counted by torch or not, in the middle of the comparison of all."""
    monkeypatch.setenv("CANARY_WEIGHTS", "on")
    run = Run(*MODES[mode])
    model = Model().to(MODES[mode][0])
    run.canary.guard_weights(model)
    for turn in range(12):
        run.clean(1 + turn % 5)
        for parameter in model.parameters():
            if turn % 2:
                parameter.data.copy_(parameter.float() + 1)
            else:
                with torch.no_grad():
                    parameter.copy_(parameter.float() + 1)
    run.clean(20)
    assert run.canary.stats()["weights_renewed"] > 0
