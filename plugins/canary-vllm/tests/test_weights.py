"""Weights that change in a running vLLM: what running requests go on with is no finding; a hit from before is one."""

import ctypes
from typing import Any

import pytest
import torch
from vllm_on_cpu import guarded

from canary_core import Kind

pytestmark = pytest.mark.timeout(600)
ONLY = pytest.mark.parametrize(
    "engine", [pytest.param("crowded", marks=pytest.mark.xdist_group("process 0"))], indirect=True
)
PROMPT = [(7 * i) % 400 + 3 for i in range(70)]


@pytest.fixture
def model(engine):
    """That of the engine; its weights are put back in the end."""
    served = engine.small.runner.get_model()
    kept = [parameter.detach().clone() for parameter in served.parameters()]
    yield served
    with torch.inference_mode():
        for parameter, content in zip(served.parameters(), kept, strict=True):
            parameter.data.copy_(content)


def train(model: Any) -> None:
    """As a trainer does, through the model's own function, with a few weights of every layer."""
    news = [(name, p.detach() * 1.01) for name, p in model.named_parameters() if "norm" in name]
    model.load_weights(iter(news))


@ONLY
def test_running_requests_are_never_blamed(engine, model):
    """More requests than there are blocks for, so that some are preempted and computed again with newer weights; the
    prefix cache is emptied of what nobody runs with."""
    small = engine.small
    with guarded.guard(small) as guard:
        for number in range(5):
            small.submit(f"request-{number}", [*PROMPT[number:], number + 3], 40)
        steps = 0
        while small.step():
            steps += 1
            if steps % 7 == 3:
                train(model)
                small.scheduler.reset_prefix_cache(reset_running_requests=True)
        guard.canary.drain()
        assert guard.trouble() == []
        assert guard.canary.stats()["weights_changed"] > 3


@ONLY
def test_a_hit_from_before_a_load_is_told_once_for_each_request(engine, model):
    """Of a load of the same weights nothing is told."""
    small = engine.small
    with guarded.guard(small) as guard:
        for number in range(4):
            small.submit(f"turn-{number}", PROMPT, 4)
            while small.step():
                pass
            if number == 0:
                model.load_weights(iter([(name, p.detach()) for name, p in model.named_parameters() if "norm" in name]))
            if number == 1:
                train(model)
        guard.canary.drain()
        found = guard.findings.violations
        assert [(v.kind, v.position, v.request) for v in found] == [
            (Kind.PREFIX, 0, "turn-2"),
            (Kind.PREFIX, 0, "turn-3"),
        ]
        assert {v.identity for v in found} == {"the weights of change 1 (load_weights)"}


@ONLY
def test_a_flipped_bit_of_a_parameter_is_named(engine, model):
    """Past torch, between two requests: by name, element, old and new value, once. What the engine loads before and
    after it through its own functions is no alarm, and neither is what is written past torch's counters."""
    small = engine.small
    name, weight = max(model.named_parameters(), key=lambda one: one[1].numel())
    with guarded.guard(small, read_check=0, scrub_budget="64MiB", weights=True) as guard:
        guarded.traffic(small, 1, "before", 8)
        train(model)
        guarded.traffic(small, 1, "trained", 8)
        everything = [(name, p.detach() * 0.99) for name, p in model.named_parameters()]
        with torch.no_grad():
            small.runner.reload_weights(weights_iterator=iter(everything), is_checkpoint_format=False)
        guarded.traffic(small, 1, "reloaded", 8)
        for parameter in model.parameters():
            parameter.data.mul_(1.01)
        guarded.traffic(small, 1, "in place", 8)
        assert guard.canary.stats()["weights_unsure"] >= 1
        assert [v for v in guard.findings.violations if v.kind is Kind.WEIGHTS] == []
        before = weight.detach().flatten()[4095].item()
        ctypes.c_uint32.from_address(weight.data_ptr() + 4 * 4095).value ^= 1 << 22
        guarded.traffic(small, 2, "flipped", 8)
        (found,) = [v for v in guard.findings.violations if v.kind is Kind.WEIGHTS]
        after = weight.detach().flatten()[4095].item()
        assert (found.source.split(" (")[0], found.element) == (name, 4095)
        assert found.old.startswith(f"{before:.6g} (0x")
        assert found.new.startswith(f"{after:.6g} (0x")
        assert guard.canary.scrub_stats()["weights_rounds"] >= 4
        (event,) = guard.findings.told("weights_guarded")
        assert event.fields["left_out"] == 0
