"""`WeightWatch`: a parameter's bytes change only when somebody updates it."""

import ctypes
import random

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine
from support.weights import Model, flip
from torch import Tensor, nn
from typer.testing import CliRunner

from canary_core import Kind
from canary_desk.cli.app import app
from canary_desk.metrics.readings import MetricReading


class Serving(Guarded):
    """A toy engine whose Canary compares the weights of ``model``, all of them after each forward."""

    def __init__(self, model: nn.Module | None = None, **settings: object) -> None:
        super().__init__(ToyEngine(slots=256), **{"weights": True, "scrub_budget": "64MiB", **settings})
        self.model = Model() if model is None else model
        self.canary.guard_weights(self.model)
        self.submit()
        self.step()

    def forwards(self, number: int = 4) -> None:
        """So many decodes, and whatever they found."""
        for _ in range(number):
            self.decode()
        self.canary.drain()

    @property
    def told(self) -> list:
        """Findings of weights."""
        return [v for v in self.findings.violations if v.kind is Kind.WEIGHTS]

    @property
    def unsure(self) -> int:
        """How many changes were only counted."""
        return self.canary.stats().get("weights_unsure", 0)


def value(tensor: Tensor, bits: int) -> str:
    """As a finding says it."""
    size = tensor.element_size()
    number = torch.tensor(list(bits.to_bytes(size, "little")), dtype=torch.uint8).view(tensor.dtype)[0]
    said = f"{float(number):.6g}" if tensor.is_floating_point() else str(number.item())
    return f"{said} (0x{bits:0{2 * size}x})"


def test_a_flip_in_each_of_twenty_parameters_is_named():
    """Of four dtypes of numbers and of halves in another order of dimensions: within one round each is told with
    parameter, element, old and new value; once, and nothing else is."""
    g, draw = Serving(), random.Random(3)
    expected = {}
    large = g.model.large()
    assert len({one.dtype for one in large.values()}) == 5
    for name in draw.sample(sorted(large), 20):
        parameter = large[name]
        element, bit = draw.randrange(parameter.numel()), draw.randrange(8 * parameter.element_size())
        before, after = flip(parameter, element, bit)
        number = element
        if not parameter.is_contiguous():
            number = element % parameter.shape[0] * parameter.shape[1] + element // parameter.shape[0]
        expected[name] = number, value(parameter, before), value(parameter, after)
    rounds = g.canary.scrub_stats()["weights_rounds"]
    g.forwards(1)
    assert g.canary.scrub_stats()["weights_rounds"] == rounds + 1
    assert {v.source.split(" (")[0]: (v.element, v.old, v.new) for v in g.told} == expected
    assert all(", bit " in v.detail for v in g.told)
    g.forwards()
    assert len(g.violations) == 20
    assert g.unsure == 0
    assert g.findings.told("incident")
    g.canary.close()


def test_an_incident_of_weights_is_diagnosed_and_kept(tmp_path):
    """As any other: with a bundle, an explanation and metrics."""
    g = Serving(None, incident_dir=str(tmp_path))
    flip(g.model.layers[2].bf16, 70, 9)
    g.forwards()
    g.canary.close()
    (diagnosis,) = g.findings.told("diagnosis")
    assert "flipped_bit" in str(diagnosis.fields)
    assert g.findings.told("bundle_failed") == g.findings.told("diagnosis_failed") == []
    (bundle,) = [path for path in tmp_path.iterdir() if path.suffix == ".json" or path.is_dir()]
    shown = CliRunner().invoke(app, ["explain", str(bundle)])
    assert shown.exit_code == 0, shown.output
    assert "layers.2.bf16" in shown.output
    reading = MetricReading.of(g.canary)
    assert reading.violations["weights", "weights"] == 1
    assert reading.weights_period_s is not None


def test_a_second_flip_of_the_same_parameter_is_told_and_the_first_undone_is_not():
    """A parameter stays compared with what it was."""
    g = Serving()
    weight = g.model.layers[1].fp32
    flip(weight, 70, 3)
    g.forwards()
    flip(weight, 20_000, 30)
    g.forwards()
    assert [v.element for v in g.told] == [70, 20_000]
    flip(weight, 70, 3)
    g.forwards()
    flip(weight, 70, 3)
    g.forwards()
    assert len(g.told) == 2


def test_bytes_written_over_a_parameter_are_told_with_their_range():
    """Several words in one place are no update: one would change all of the parameter."""
    g = Serving()
    weight = g.model.layers[2].fp32
    ctypes.memset(weight.data_ptr() + 30_000, 0x55, 64)
    g.forwards()
    (found,) = g.told
    assert (found.source, found.element, found.old) == ("layers.2.fp32", None, None)
    begin, end = map(int, found.detail.removeprefix("bytes ").split(" to "))
    assert begin <= 30_000 < 30_063 <= end
    assert "layers.2.fp32" in found.explanation


def test_updates_that_torch_counts_are_no_alarm():
    """An optimizer's step, a state loaded, a copy, another tensor: the content is taken anew, and a flip after it is
    told."""
    g = Serving()
    model = g.model
    trained = [parameter for parameter in model.parameters() if parameter.dtype is torch.float32]
    for parameter in trained:
        parameter.requires_grad_(True)
    for optimizer in (torch.optim.SGD(trained, 0.1), torch.optim.SGD(trained, 0.1, foreach=False)):
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        g.forwards()
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
    g.forwards()
    with torch.no_grad():
        model.layers[0].bf16[3, 4] = 7.0
        g.forwards()
        model.layers[0].int8.copy_(torch.ones(127, 33))
    g.forwards()
    model.layers[0].fp8 = nn.Parameter(torch.ones(64, 48).to(torch.float8_e4m3fn), requires_grad=False)
    g.forwards()
    model.layers[1].fp32.data = torch.ones(300, 128)
    g.forwards()
    assert g.violations == []
    assert g.unsure == 0
    assert g.canary.stats()["weights_renewed"] > 20
    flip(model.layers[1].fp32, 5, 1)
    flip(model.layers[0].fp8, 9, 6)
    g.forwards()
    assert [(v.source, v.element) for v in g.told] in (
        [("layers.1.fp32", 5), ("layers.0.fp8", 9)], [("layers.0.fp8", 9), ("layers.1.fp32", 5)]
    )  # fmt: skip


def through_data(model: nn.Module) -> None:
    """Writes that torch counts for nobody."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.float() + 1)


def fused(model: nn.Module) -> None:
    """An optimizer that counts no versions."""
    trained = [parameter for parameter in model.parameters() if parameter.dtype is torch.float32]
    for parameter in trained:
        parameter.requires_grad_(True).grad = torch.ones_like(parameter)
    torch.optim.AdamW(trained, fused=True).step()


@pytest.mark.parametrize("update", [through_data, fused])
def test_an_update_past_the_version_counters_is_counted(update):
    """Whoever writes so and says nothing changes all of a parameter, so it is no damage for certain."""
    g = Serving()
    update(g.model)
    g.forwards()
    assert g.violations == []
    assert g.unsure >= 1
    assert g.findings.told("weights_unsure")
    flip(g.model.layers[3].bf16, 11, 2)
    g.forwards()
    assert [v.element for v in g.told] == [11]


def test_a_part_of_a_parameter_updated_past_its_counter_is_counted():
    """One projection of several that are one parameter; and a scale of one number."""
    g = Serving()
    g.model.layers[0].fp32.data[:60] += 1
    g.model.layers[1].scale.data.fill_(0.25)
    g.forwards()
    assert g.violations == []
    assert g.unsure >= 1


def test_an_update_that_is_told_is_neither_told_nor_counted():
    """Whatever it changes, where the engine says so before the next forward."""
    g = Serving()
    g.model.layers[0].fp32.data[4, 4] = 9.0
    g.canary.guard_weights(g.model)
    g.forwards()
    g.model.layers[0].fp32.data[5, 4] = 9.0
    g.canary.step.weights_changed("a test")
    g.forwards()
    assert g.violations == []
    assert g.unsure == 0


def test_a_buffer_that_is_written_while_serving_is_no_alarm():
    """One that has proved constant is compared: there a bit is told; one that changes is not."""
    g = Serving()
    g.forwards(5)
    flip(g.model.layers[0].bias, 100, 4)
    g.forwards()
    assert [(v.source, v.element) for v in g.told] == [("layers.0.bias", 100)]
    for i in range(30):
        g.model.layers[1].bias.data[i] = float(i)
        g.forwards(1)
    flip(g.model.layers[2].cache, 3, 3)
    g.forwards()
    assert len(g.violations) == 1
    assert "layers.1.bias" in str(g.findings.told("weights_unsure"))


def test_memory_that_is_gone_is_not_read():
    """Parameters that were freed, emptied or moved to the meta device are left out as their turn comes."""
    g = Serving()
    g.model.layers[0].fp32.untyped_storage().resize_(0)
    g.model.layers[1].to("meta")
    del g.model.layers[3]
    g.forwards()
    assert g.violations == []
    stats = g.canary.scrub_stats()
    assert stats["weights_left_out"] >= 8
    flip(g.model.layers[2].fp32, 8, 8)
    g.forwards()
    assert [v.element for v in g.told] == [8]


def test_tied_parameters_count_once():
    """Also those that share memory without being one object, whichever of them is updated."""
    g = Serving()
    stats = g.canary.scrub_stats()
    tied = g.model.embedding.weight
    assert stats["weights_bytes"] == sum(t.nbytes for name, t in g.model.state_dict().items() if name != "head.weight")
    other = nn.Linear(64, 90, bias=False)
    other.weight = nn.Parameter(tied.data)
    g.model.add_module("other", other)
    g.canary.guard_weights(g.model)
    g.forwards()
    assert g.canary.scrub_stats()["weights_bytes"] == stats["weights_bytes"]
    with torch.no_grad():
        other.weight[5, 5] = 3.0
    g.forwards()
    assert g.violations == []
    flip(tied, 500, 12)
    g.forwards()
    (found,) = g.told
    assert found.source.startswith("embedding.weight (also ")


def test_no_reference_keeps_weights_alive():
    """What an engine lets go is freed."""
    import weakref

    g = Serving()
    gone = weakref.ref(g.model.layers[0].fp32)
    g.model.layers[0].fp32 = None
    assert gone() is None
    g.forwards()
    assert g.violations == []


def test_memory_is_a_five_thousandth_of_large_weights():
    """12 bytes for each 64 KiB, beside some fixed ones."""
    model = nn.Linear(4096, 4096, bias=False)
    g = Serving(model)
    stats = g.canary.scrub_stats()
    table = g.canary.step.weights._table
    fixed = table.keys.nbytes + table.found.nbytes
    assert stats["weights_memory_bytes"] - fixed <= 0.0002 * stats["weights_bytes"]


def test_a_round_takes_several_forwards_where_the_budget_is_small():
    """And its length is told."""
    g = Serving(scrub_budget="64KiB")
    g.forwards(20)
    stats = g.canary.scrub_stats()
    assert stats["weights_rounds"] >= 1
    assert stats["weights_period_s"] > 0
    flip(g.model.layers[3].fp32, 30_000, 30)
    g.forwards(20)
    assert [v.element for v in g.told] == [30_000]


def test_off_costs_nothing():
    """By default nothing is kept, and nothing is compared."""
    g = Serving(weights=False)
    assert g.canary.step.weights is None
    flip(g.model.layers[3].fp32, 3, 3)
    g.forwards()
    assert g.violations == []
    assert not [name for name in {**g.canary.stats(), **g.canary.scrub_stats()} if name.startswith("weights_")]


@pytest.mark.parametrize(("given", "settings", "why"), [
    (False, {}, "no parameter was handed"),
    (True, {"scrub_budget": "0"}, "CANARY_SCRUB_BUDGET is 0"),
])  # fmt: skip
def test_weights_that_are_never_compared_are_said(given, settings, why):
    """Where the setting is on, after some hundred forwards."""
    g = Guarded(weights=True, **settings)
    if given:
        g.canary.guard_weights(Model())
    g.submit()
    for _ in range(300):
        g.step()
    (event,) = g.findings.told("weights_unguarded")
    assert why in event.fields["reason"]


def test_coverage_of_weights_is_said():
    """Number, bytes and what is left out."""
    model = Model()
    model.layers[0].sparse = nn.Parameter(torch.zeros(8, 8)[:, :3])
    g = Serving(model)
    (event,) = g.findings.told("weights_guarded")
    assert event.fields["parameters"] == event.fields["left_out"] + len(list(model.parameters())) + 4 - 2
    assert "left out: 1 with gaps between its elements" in event.fields["summary"]


def test_a_canary_goes_on_where_the_last_one_ended():
    """As one for each cache of a model does: nothing is read at once, and what changed in between is told."""
    g = Serving()
    g.forwards()
    g.canary.close()
    flip(g.model.layers[2].fp32, 70, 7)
    other = Guarded(ToyEngine(slots=256), weights=True, scrub_budget="64MiB")
    other.canary.guard_weights(g.model, resume=True)
    other.submit()
    other.step()
    (found,) = other.violations
    assert found.element == 70
    assert len(other.findings.told("weights_guarded")) == 0
    other.canary.close()
    flip(g.model.layers[2].fp32, 90, 7)
    last = Guarded(ToyEngine(slots=256), weights=True, scrub_budget="64MiB")
    last.canary.guard_weights(g.model)
    last.submit()
    last.step()
    assert last.violations == []


def test_inference_mode_does_not_matter():
    """Engines serve within the mode, and begin without it. Parameters made within count no versions."""
    g = Serving()
    with torch.inference_mode():
        g.forwards()
        g.model.layers[1].fp32.mul_(2)
        g.forwards()
        flip(g.model.layers[1].fp32, 9, 9)
        g.forwards()
    g.forwards()
    assert [v.element for v in g.told] == [9]
    with torch.inference_mode():
        model = Model()
    other = Serving(model)
    with torch.inference_mode():
        other.forwards()
        model.layers[1].fp32.mul_(2)
        other.forwards()
    assert other.violations == []
    assert other.unsure == 1
    flip(model.layers[1].fp32, 9, 9)
    other.forwards()
    assert [v.element for v in other.told] == [9]
