"""`WatchedScales`: a change of a layer's scale, and nothing else, counts as a change of the weights."""

from collections.abc import Callable

import pytest
import torch
from support.guarded import Guarded
from torch import nn

from canary_adapters import WatchedScales

NAMES = ("_k_scale_float", "_k_scale", "v_scale")


class Layer(nn.Module):
    """As engines have them: a number, a buffer, a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self._k_scale_float = 1.0
        self.register_buffer("_k_scale", torch.ones(1))
        self.v_scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.calculate_kv_scales = False


def number(layer: Layer) -> None:
    """As a load does."""
    layer._k_scale_float = 0.5


def filled(layer: Layer) -> None:
    """In place."""
    layer._k_scale.fill_(0.5)


def replaced(layer: Layer) -> None:
    """Another tensor."""
    layer.v_scale = nn.Parameter(torch.tensor([1.0, 3.0]), requires_grad=False)


def told(guarded: Guarded) -> list[dict[str, object]]:
    """The events of scales."""
    return [event.fields for event in guarded.findings.events if event.name == "scales_changed"]


@pytest.mark.parametrize(
    ("change", "said"),
    [(number, ("k_scale", "1", "0.5")), (filled, ("k_scale", "1", "0.5")), (replaced, ("v_scale", "1, 1", "1, 3"))],
)
def test_a_change_is_told_once_with_layer_and_scales(change: Callable[[Layer], None], said: tuple[str, ...]) -> None:
    """By the next look, once something may have been written."""
    guarded = Guarded()
    layers = {"layers.0": Layer(), "layers.1": Layer()}
    scales = WatchedScales(guarded.canary, layers, NAMES)
    guarded.submit()
    guarded.step()
    scales.look()
    assert told(guarded) == []
    change(layers["layers.1"])
    for _ in range(2):
        scales.look()
    (event,) = told(guarded)
    assert event["layer"] == "layers.1"
    assert (event["scale"], event["old"], event["new"]) == said
    assert guarded.canary.writers.identities.weights == 1


def test_what_means_the_same_is_no_change() -> None:
    """The same scale written again, and what the engine says that its first forward computes."""
    guarded = Guarded()
    layer = Layer()
    layer.calculate_kv_scales = True
    scales = WatchedScales(guarded.canary, {"layers.0": layer}, NAMES)
    guarded.submit()
    guarded.step()
    layer._k_scale.fill_(0.25)
    layer._k_scale_float, layer.calculate_kv_scales = 0.25, False
    scales.look()
    layer._k_scale.fill_(0.25)
    layer.v_scale = nn.Parameter(torch.ones(2), requires_grad=False)
    scales.look()
    assert told(guarded) == []
    assert guarded.canary.writers.identities.weights == 0
    filled(layer)
    scales.look()
    assert len(told(guarded)) == 1
