"""``CANARY_LAYERS``: a process guards the bytes of some layers, a fleet those of all."""

import pytest
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import CanaryConfig, ConfigError
from canary_core.config import LayerShare
from canary_core.layers import guarded_layers, turn_of
from canary_core.records import Kind
from canary_core.region import Placement
from canary_desk.metrics.readings import MetricReading


@pytest.mark.parametrize(
    ("text", "share"),
    [("all", LayerShare()), ("1/8", LayerShare(8)), ("1/8@3", LayerShare(8, 3)), ("1/1", LayerShare(1))],
)
def test_a_share_is_written_as_a_fraction(text, share):
    """And is printed as written."""
    config = CanaryConfig.load(layers=text)
    assert config.layers == share
    assert str(config.layers) == text


@pytest.mark.parametrize("text", ["", "8", "2/8", "1/0", "1/8@8", "1/8@", "12%", "none", "1/99999"])
def test_other_texts_say_what_is_meant(text):
    """With what was got."""
    with pytest.raises(ConfigError, match=r"CANARY_LAYERS must be all, a share such as 1/8, .*got"):
        CanaryConfig.load(layers=text or " ")


def test_turns_go_by_place_and_cover_all():
    """Replicas, or ranks, of one start have turns one after the other, whatever numbers the layers have."""
    layers = [3, 7, 11, 15, 19, 23, 27, 31, 35]
    for name in ("replica", "rank"):
        fleet = [CanaryConfig.load(layers="1/8", **{name: n}) for n in range(8)]
        assert sorted(turn_of(config) for config in fleet) == list(range(8))
        chosen = [guarded_layers(layers, config) for config in fleet]
        assert sorted(layer for one in chosen for layer in one) == layers
        assert all(one == guarded_layers(layers, config) for one, config in zip(chosen, fleet, strict=True))


def stray_writes(replica: int) -> set[int]:
    """Layers that one engine of the fleet names, after somebody has changed one value in each of 16 layers."""
    guarded = Guarded(ToyEngine(layers=16), layers="1/8", replica=replica, read_check=-1)
    request = guarded.submit(tokens=5)
    guarded.step()
    for k in guarded.engine.k:
        k[request.slots[2]] += 1
    guarded.decode()
    guarded.canary.close()
    assert {violation.kind for violation in guarded.violations} == {Kind.BYTES}
    return {int(source.partition(".")[2]) for v in guarded.violations for source in v.sources or (v.source,)}


def test_eight_engines_find_a_stray_write_in_any_layer():
    """Each in its two of sixteen layers."""
    found = [stray_writes(replica) for replica in range(8)]
    assert [len(layers) for layers in found] == [2] * 8
    assert set().union(*found) == set(range(16))


def test_the_metrics_say_whose_turn_it_is():
    """As it was chosen, also where the setting names no turn: so a fleet can be counted by turns."""
    fleet = [Guarded(ToyEngine(layers=16), layers="1/8", replica=replica) for replica in range(8)]
    told = {MetricReading.of(one.canary).info[-1] for one in (*fleet, Guarded(ToyEngine(layers=16)))}
    assert told == {"all", *(f"1/8@{turn}" for turn in range(8))}


def test_memory_is_that_share_and_the_start_says_so():
    """Without a warning of lost coverage by size: slots of all layers are checked."""
    whole, share = (Guarded(ToyEngine(layers=16), layers=layers) for layers in ("all", "1/8@3"))
    (all_of, part) = (one.canary.states["full"].fingerprints for one in (whole, share))
    assert part.nbytes * 8 == all_of.nbytes
    (event,) = share.findings.told("coverage")
    assert event.fields["coverage_ratio"] == 1
    assert "CANARY_LAYERS=1/8@3: those of layers 3, 11 are guarded here" in str(event.fields["summary"])
    assert share.findings.told("attached")[0].fields["layers"] == "1/8@3"
    assert whole.findings.told("coverage")[0].level == "info"


def test_slots_of_all_layers_are_checked():
    """A pool with fewer layers than turns has none of this turn: a wrong slot is found all the same."""
    guarded = Guarded(ToyEngine(layers=2), layers="1/8@5", read_check=-1)
    request = guarded.submit(tokens=5)
    guarded.step()
    request.slots[1] = request.slots[2]
    guarded.decode()
    guarded.canary.close()
    assert {violation.kind for violation in guarded.violations} == {Kind.POSITION}


def test_moved_tensors_are_those_of_the_turn():
    """A cache that grows gives the tensors of all layers, and the guarded ones are taken."""
    engine = ToyEngine(layers=16)
    guarded = Guarded(engine, layers="1/8@3")
    state = guarded.canary.states["full"]
    old = [s.address for s in state.sources]
    tensors = [t.clone() for pair in zip(engine.k, engine.v, strict=True) for t in pair]
    row = engine.k[0].shape[1] * engine.k[0].element_size()
    assert guarded.canary.slots.rebind_alike("full", tensors, [Placement(row, row, 0, 1)] * 2)
    assert [s.name for s in state.sources] == ["k.3", "v.3", "k.11", "v.11"]
    now = [s.address for s in state.sources]
    assert now == [tensors[i].data_ptr() for i in (6, 7, 22, 23)]
    assert set(now).isdisjoint(old)
    guarded.canary.close()
