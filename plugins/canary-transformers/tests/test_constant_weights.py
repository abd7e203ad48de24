"""``CANARY_WEIGHTS`` on real models: a bit that flips in a parameter is told, an update in place is not."""

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny.batching import Traffic, serve
from tiny.generation import generate, prompts
from tiny.models import batching, generating

from canary_core import Kind

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHT = "model.layers.1.mlp.up_proj.weight"


def serve_some(model: Any) -> None:
    """Continuous batching: a manager of its own for each call."""
    serve(model, Traffic(seed=3, requests=4, new_tokens=6))


def generate_some(model: Any) -> None:
    """`generate()`: a cache of its own for each call."""
    generate(model, prompts(2, 9), max_new_tokens=8)


ENGINES = pytest.mark.parametrize(
    ("make", "run"), [(batching, serve_some), (generating, generate_some)], ids=["continuous", "generate"]
)


@ENGINES
def test_a_flipped_bit_of_a_parameter_is_named(
    make: Callable[[str], Any], run: Callable[[Any], None], guard: Any
) -> None:
    """By name, element, old and new value, past torch: no version counter moves. Told once, however many answers
    follow, and wherever in the round the parameter has its turn: the next manager, or cache, goes on."""
    model = copy.deepcopy(make("llama"))
    guarded = guard(model, weights=True)
    run(model)
    assert guarded.violations == []
    weight = model.get_parameter(WEIGHT)
    before = weight.detach().clone()

    class Flip:
        """Within a forward, so that the guard has looked at the weights before."""

        calls = 0

        def __call__(self, *_: Any) -> None:
            self.calls += 1
            if self.calls == 3:
                ctypes.c_uint32.from_address(weight.data_ptr() + 4 * 77).value ^= 1 << 12

    hook = model.model.layers[0].register_forward_hook(Flip())
    run(model)
    hook.remove()
    for _ in range(2):
        run(model)
    (found,) = [v for v in guarded.violations if v.kind is Kind.WEIGHTS]
    assert found.source == WEIGHT
    assert found.element == 77
    for said, value in ((found.old, before.flatten()[77]), (found.new, weight.detach().flatten()[77])):
        assert said == f"{float(value):.6g} (0x{int(value.view(torch.int32)) & 0xFFFFFFFF:08x})"
    assert guarded.stats().get("weights_unsure", 0) == 0


@ENGINES
def test_updates_in_place_are_no_alarm(make: Callable[[str], Any], run: Callable[[Any], None], guard: Any) -> None:
    """As a trainer makes them, counted by torch or not, between answers and in the middle of one."""
    model = copy.deepcopy(make("llama"))
    guarded = guard(model, weights=True)

    class Train:
        """Now and then a step, of all parameters."""

        calls = 0

        def __call__(self, *_: Any) -> None:
            self.calls += 1
            for parameter in model.parameters():
                if self.calls % 3 == 1:
                    with torch.no_grad():
                        parameter.mul_(1.001)
                elif self.calls % 3 == 2:
                    parameter.data.mul_(1.001)

    hook = model.model.layers[0].register_forward_hook(Train())
    for _ in range(2):
        run(model)
    hook.remove()
    model.load_state_dict(make("llama").state_dict())
    run(model)
    assert [v for v in guarded.violations if v.kind is Kind.WEIGHTS] == []
    stats = guarded.stats()
    assert stats["weights_renewed"] > 0
    assert stats["weights_compared_chunks"] > 0
