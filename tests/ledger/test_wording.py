"""Which sources differ, folded."""

import pytest
import torch

from canary_core import KVSource
from canary_core.watchers.ledger.wording import fold


def sources(layers=6, halves=("k", "v")):
    """Sources in the order of layers, their halves side by side."""
    data = torch.zeros(4, 16, dtype=torch.uint8)
    return [KVSource(data, half, layer, 16, 16) for layer in range(layers) for half in halves]


@pytest.mark.parametrize(
    ("differing", "said"),
    [
        ([7], "1 of 12 sources differs: layer 3 V"),
        (range(12), "12 of 12 sources differ: every layer, K and V"),
        (range(1, 12, 2), "6 of 12 sources differ: every layer, V"),
        ([6, 7], "2 of 12 sources differ: layer 3 K and V"),
        ([0, 2], "2 of 12 sources differ: layers 0 and 1 K"),
        ([0, 4, 6, 8], "4 of 12 sources differ: layers 0 and 2 to 4 K"),
        ([0, 3], "2 of 12 sources differ: layer 0 K; layer 1 V"),
        ([*range(0, 12, 2), 3], "7 of 12 sources differ: every layer, K; layer 1 V"),
    ],
)
def test_layers_and_halves_are_named_once(differing, said):
    """All that differ, in as few words as name them exactly."""
    assert fold(sources(), list(differing)) == said


def test_parts_of_a_half_are_one():
    """A layer whose keys are in two places is named once."""
    twice = sources(3, ("k", "k", "v"))
    assert fold(twice, [3, 4, 5]) == "3 of 9 sources differ: layer 1 K and V"
    assert fold(twice, [0, 1, 3, 4, 6, 7]) == "6 of 9 sources differ: every layer, K"


def test_one_layer_is_not_every_layer():
    """Of a model with one, it is named."""
    assert fold(sources(1), [0, 1]) == "2 of 2 sources differ: layer 0 K and V"
    assert fold(sources(2, ("kv", "k_scale")), [1]) == "1 of 4 sources differs: layer 0 k_scale"
