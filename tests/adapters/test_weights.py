"""`WatchedWeights`: a difference is certain; `AdapterContents` and `WeightLoads` tell of those that matter."""

from collections.abc import Callable

import pytest
import torch
from support.guarded import Guarded
from torch import nn

from canary_adapters import AdapterContents, WatchedWeights, WeightLoads
from canary_core import Patches


class Model(nn.Module):
    """A layer, an embedding, a parameter of its own and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 32)])
        self.scale = nn.Parameter(torch.ones(3, 5, 7))
        self.lm_head = nn.Linear(32, 300, bias=False)
        self.register_buffer("calls", torch.zeros(1))

    def load_weights(self, by: float) -> None:
        """As engines do: the version counters do not count it."""
        for parameter in self.parameters():
            parameter.data.copy_(parameter.data + by)


@torch.no_grad()
def in_place(model: Model) -> None:
    """As an optimizer does."""
    model.layers[0].weight.mul_(1.01)


def replaced(model: Model) -> None:
    """Another object, while the old one lives."""
    model.old = [model.layers[1].bias]
    model.layers[1].bias = nn.Parameter(torch.full((32,), 3.0))


def other_memory(model: Model) -> None:
    """The same object."""
    model.embed.weight.data = model.embed.weight.data + 1


@pytest.mark.parametrize("change", [in_place, replaced, other_memory])
def test_a_change_is_seen_once(change: Callable[[Model], None]) -> None:
    """By the next look."""
    model = Model()
    weights = WatchedWeights(model)
    assert not weights.look()
    change(model)
    assert weights.look()
    assert not weights.look()
    assert not weights.compare()


@torch.no_grad()
def same_content(model: Model) -> None:
    """Written again."""
    model.layers[0].weight.copy_(model.layers[0].weight.clone())


def moved(model: Model) -> None:
    """To another address."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@torch.no_grad()
def head(model: Model) -> None:
    """No KV depends on it."""
    model.lm_head.weight.add_(1)


def added(model: Model) -> None:
    """As an adapter is that nobody uses yet."""
    if not hasattr(model, "lora"):
        model.lora = nn.Linear(32, 4)


def buffer(model: Model) -> None:
    """Such as a cache of angles."""
    model.calls += 1


@pytest.mark.parametrize("change", [same_content, moved, head, added, buffer])
def test_what_makes_no_other_kv_is_none(change: Callable[[Model], None]) -> None:
    """Neither by a look, nor after a load."""
    model = Model()
    weights = WatchedWeights(model)
    for _ in range(3):
        change(model)
        assert not weights.look()
        assert not weights.compare()


def test_a_load_that_version_counters_do_not_count_is_seen_by_comparison() -> None:
    """Inference tensors have no counters at all."""
    model = Model()
    weights = WatchedWeights(model)
    model.load_weights(1.0)
    assert not weights.look()
    assert weights.compare()
    with torch.inference_mode():
        model = Model()
    weights = WatchedWeights(model)
    assert weights.unwatched == 6
    with torch.inference_mode():
        model.layers[0].weight.add_(1)
    assert not weights.look()
    assert weights.compare()


def test_parameters_without_memory_are_left_out() -> None:
    """On the meta device, as of an offloaded layer; until they come back as they were, or as something else."""
    model = Model()
    kept = model.layers[0].weight
    weights = WatchedWeights(model)
    assert weights.unwatched == 0
    model.layers[0].weight = nn.Parameter(torch.empty(64, 32, device="meta"))
    assert not weights.look()
    model.layers[0].weight = kept
    assert not weights.look()
    model.layers[1] = nn.Linear(64, 32, device="meta")
    assert not weights.look()


def test_a_model_whose_parameters_always_move_is_left_alone() -> None:
    """As with offloading: the reads would cost more than they tell."""
    model = Model()
    weights = WatchedWeights(model)
    for _ in range(40):
        moved(model)
        assert not weights.look()
    assert weights.gave_up
    in_place(model)
    assert not weights.look()
    assert weights.compare()


def test_big_parameters_are_sampled_in_all_dimensions() -> None:
    """A change of everything is seen, in any layout."""
    for shape in ((5000, 3), (1, 100_000), (40, 50, 60)):
        module = nn.Module()
        module.weight = nn.Parameter(torch.rand(shape).transpose(0, -1))
        weights = WatchedWeights(module)
        with torch.no_grad():
            module.weight.add_(1)
        assert weights.look()


def test_an_adapter_is_another_one_by_its_content() -> None:
    """Not the first time, nor with the same content, nor where it was forgotten."""
    known, one, two = AdapterContents(capacity=2), [torch.ones(4, 8), torch.zeros(3)], [torch.ones(4, 8), torch.ones(3)]
    assert [known.loaded("sql", tensors) for tensors in (one, one, two, two, one)] == [False, False, True, False, True]
    for name in ("a", "b"):
        known.loaded(name, one)
    assert not known.loaded("sql", two)


def test_only_loads_that_change_something_are_told() -> None:
    """A load within another is part of it; one that fails may have changed something."""
    guarded, model = Guarded(), Model()

    class Runner:
        def reload(self, by: float) -> None:
            model.load_weights(by)
            if by == 2:
                raise KeyError("some layer")

    runner, patches = Runner(), Patches()
    loads = WeightLoads(guarded.canary, model)
    loads.follow(patches, runner, "reload", "no_such_function")
    loads.follow(patches, model, "load_weights")
    known = guarded.canary.writers.identities
    runner.reload(0.0)
    assert known.weights == 0
    runner.reload(1.0)
    model.load_weights(1.0)
    assert known.weights == 2
    with pytest.raises(KeyError):
        runner.reload(2.0)
    assert known.weights == 3
    patches.undo()
    runner.reload(1.0)
    assert known.weights == 3


class Rotary(nn.Module):
    """As in models of Transformers and engines."""

    def __init__(self, rope_type: str = "default") -> None:
        super().__init__()
        self.rope_type = rope_type
        self.register_buffer("inv_freq", 1 / 1e4 ** torch.linspace(0, 1, 16), persistent=False)
        self.register_buffer("cos_sin_cache", torch.outer(torch.arange(256.0), self.inv_freq).cos(), persistent=False)


def test_a_rotary_embedding_that_is_scaled_otherwise_is_a_change() -> None:
    """In place or replaced, by frequencies or by the table made of these."""
    rotary = Rotary()
    weights = WatchedWeights(rotary)
    assert not weights.look()
    rotary.inv_freq /= 4
    assert weights.look()
    rotary.cos_sin_cache = rotary.cos_sin_cache[::2].clone()
    assert weights.look()
    assert not weights.look()
    assert weights.unwatched == 0


def test_what_engines_do_to_rotary_embeddings_is_no_change() -> None:
    """Converted, grown, moved; and those that depend on the length of a sequence."""
    rotary, dynamic = Rotary(), Rotary("dynamic")
    both = nn.ModuleList([rotary, dynamic])
    weights = WatchedWeights(both)
    rotary.cos_sin_cache = torch.cat([rotary.cos_sin_cache, torch.zeros(100, 16)])
    assert not weights.look()
    rotary.cos_sin_cache = rotary.cos_sin_cache.bfloat16()
    rotary.inv_freq = rotary.inv_freq.clone()
    dynamic.inv_freq = dynamic.inv_freq / 2
    assert not weights.look()
