"""Layers that share fingerprints (``CANARY_MEMORY``): what is named all the same, and what is not."""

from random import Random

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from benchmarks.shards import SHARDS, share
from canary_core import CanaryConfig, ConfigError, Kind, KVSource, Region, check_payload
from canary_core.ops import sums
from canary_core.ops.state import RegionState, Shared
from canary_core.ops.torch.sums import summed

LAYERS = 6


@pytest.fixture
def shared(monkeypatch):
    """However small the pool; up to three layers in a group."""
    monkeypatch.setattr(sums, "FREE_BYTES", 0)
    monkeypatch.setattr(sums, "MOST_PARTS", 3)


def served(backend):
    """A request of twelve tokens, the bytes of all of which are compared before each forward."""
    guarded = Guarded(ToyEngine(layers=LAYERS), read_check=-1, backend=backend)
    guarded.request = guarded.submit(tokens=12)
    guarded.step(12)
    return guarded


@pytest.fixture(params=["torch", "triton"])
def guarded(shared, request):
    """`served`, on both back ends."""
    guarded = served(request.param)
    yield guarded
    guarded.canary.close()


def tensors(guarded):
    """The pool's tensors by source."""
    engine = guarded.engine
    return {f"{half}.{n}": getattr(engine, half)[n] for n in range(LAYERS) for half in "kv"}


def told(guarded):
    """Kinds and sources of the findings of the next forward."""
    guarded.violations.clear()
    guarded.decode()
    guarded.canary.drain()
    return {(v.kind, v.source, v.layer, v.half) for v in guarded.violations}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_flipped_bit_is_named_in_every_layer(shared, backend):
    """With the layer, the half, the word and its value before, by the diagnosis."""
    for name in (f"{half}.{n}" for n in range(LAYERS) for half in "kv"):
        guarded = served(backend)
        word = tensors(guarded)[name].view(torch.int32)[guarded.request.slots[5]]
        old = int(word[3]) & 0xFFFFFFFF
        word[3] ^= 1 << 9
        assert told(guarded) == {(Kind.BYTES, name, int(name[2:]), name[0])}
        guarded.canary.close()
        (incident,) = guarded.findings.incidents
        diagnosis = incident.diagnoses[0]
        assert diagnosis.name == "flipped_bit"
        assert f"slot {guarded.request.slots[5]} in {name}: the word was 0x{old:08x}" in str(diagnosis)


def test_damage_of_any_shape_in_one_layer_is_named(guarded):
    """Random bytes over a slot, in each layer."""
    for name, tensor in tensors(guarded).items():
        slot = guarded.request.slots[2]
        kept = tensor[slot].clone()
        tensor[slot] = torch.randn_like(tensor[slot].float()).to(tensor.dtype)
        assert told(guarded) == {(Kind.BYTES, name, int(name[2:]), name[0])}
        tensor[slot] = kept


def test_of_two_damaged_layers_of_a_group_the_group_is_named(guarded):
    """And both layers where they are of two groups."""
    k, slot = guarded.engine.k, guarded.request.slots[2]
    kept = k[2][slot].clone()
    k[0][slot] += 1
    k[2][slot] += 1
    assert told(guarded) == {(Kind.BYTES, "k.0..2", None, "k")}
    assert {v.sources for v in guarded.violations} == {("k.0", "k.1", "k.2")}
    k[2][slot] = kept
    k[4][slot] += 1
    assert told(guarded) == {(Kind.BYTES, "k.0", 0, "k"), (Kind.BYTES, "k.4", 4, "k")}


def test_the_same_bit_flipped_both_ways_in_two_layers_is_seen(guarded):
    """The first number of the group stays."""
    slot, bit = guarded.request.slots[2], 1 << 4
    for layer, value in ((0, 0), (1, bit)):
        guarded.engine.k[layer].view(torch.int32)[slot, 1] = value
    guarded.canary.slots.adopt_bytes("full", torch.tensor([slot]))
    for layer in (0, 1):
        guarded.engine.k[layer].view(torch.int32)[slot, 1] ^= bit
    assert told(guarded) == {(Kind.BYTES, "k.0..2", None, "k")}


def test_nan_is_named(guarded):
    """In the layer that wrote it."""
    forward = guarded.engine.forward

    def poison(batch):
        forward(batch)
        guarded.engine.v[4][batch.tables["full"].write_slots.long()] = float("nan")

    guarded.engine.forward = poison
    assert told(guarded) == {(Kind.NON_FINITE, "v.4", 4, "v")}


def test_kv_of_another_slot_is_recognised(guarded):
    """In all layers: the diagnosis says whose it is."""
    slots = guarded.request.slots
    for tensor in tensors(guarded).values():
        tensor[slots[5]] = tensor[slots[9]]
    assert {kind for kind, *_ in told(guarded)} == {Kind.BYTES}
    (incident,) = guarded.findings.incidents
    assert incident.diagnoses[0].name in ("overwritten", "shifted")
    assert f"slot {slots[9]}" in str(incident.diagnoses[0])


def test_a_write_lost_in_all_layers_is_told_and_in_one_layer_it_is_said_that_it_is_not(guarded):
    """By the coverage, which names what to set."""
    kept = {name: t.clone() for name, t in tensors(guarded).items()}
    guarded.decode()
    slot = guarded.request.slots[-1]

    def lose(names):
        forward = ToyEngine.forward

        def without(batch):
            slots = batch.tables["full"].write_slots.long()
            before = {name: tensors(guarded)[name][slots].clone() for name in names}
            forward(guarded.engine, batch)
            for name in names:
                tensors(guarded)[name][slots] = before[name]

        guarded.engine.forward = without

    assert slot not in kept
    lose(["k.1"])
    assert told(guarded) == set()
    (doubt,) = [u for u in guarded.canary.coverage.uncovered if u.name == "single layers of full"]
    assert "up to 3 layers share fingerprints" in doubt.reason
    assert "CANARY_MEMORY=exact" in doubt.reason
    lose(list(kept))
    assert {kind for kind, *_ in told(guarded)} == {Kind.LOST_WRITE}
    assert {v.source for v in guarded.violations} == {"k.0..2", "k.3..5", "v.0..2", "v.3..5"}


def test_bytes_in_host_memory_are_checked_by_the_layers_that_share(guarded):
    """A flip is named; without all layers of a group nothing is said of it."""
    canary, slots = guarded.canary, torch.tensor(guarded.request.slots[2:6])
    payload, layout = canary.slots.export_records("full", slots), canary.slots.payload_layout("full")
    parked = {name: tensor[slots].clone() for name, tensor in tensors(guarded).items()}
    whole = check_payload(layout, payload, parked)
    assert (whole.differences, whole.checked, whole.skipped) == ((), 4 * 2 * LAYERS, 0)
    parked["v.3"].view(torch.int32)[1, 2] ^= 1 << 30
    (difference,) = check_payload(layout, payload, parked).differences
    assert (difference.source, difference.row) == ("v.3", 1)
    parked["v.5"].view(torch.int32)[1, 0] ^= 1
    assert {d.source for d in check_payload(layout, payload, parked).differences} == {"v.3", "v.4", "v.5"}
    del parked["v.4"]
    part = check_payload(layout, payload, parked)
    assert (part.differences, part.skipped) == ((), 2 * 4)


def test_a_small_pool_has_a_fingerprint_for_each_layer():
    """What it takes is too little to matter."""
    guarded = Guarded(ToyEngine(layers=LAYERS))
    assert not guarded.canary.states["full"].sources.sums
    assert guarded.canary.states["full"].sources.columns == 2 * LAYERS
    guarded.canary.close()


@pytest.mark.parametrize("name", SHARDS)
def test_memory_is_within_the_setting(name):
    """Of every pool but one, whose records alone are more."""
    most = 0.016 if name.startswith("gpt-oss") else 0.01
    assert share(SHARDS[name]) <= most
    assert share(SHARDS[name], memory="2%") <= 0.02
    assert share(SHARDS[name], memory="exact") >= share(SHARDS[name])


def test_every_source_of_a_shard_names_itself():
    """A rank of 8 of a 70B model: whatever changes in one of 160 sources, the two numbers say in which."""
    draw, made, slots = Random(3), torch.Generator().manual_seed(3), 8
    rows = [torch.randint(0, 256, (slots, 256), dtype=torch.uint8, generator=made) for _ in range(160)]
    sources = tuple(
        KVSource(r, "kv"[i % 2], i // 2, chunk_bytes=256, slot_stride_bytes=256) for i, r in enumerate(rows)
    )
    config = CanaryConfig()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "FREE_BYTES", 0)
        state = RegionState(Region("kv", slots, sources), 0, Shared.allocate(config, torch.device("cpu")), config)
    assert state.sources.columns <= (0.01 * 160 * 256 - 48) / 8
    every = torch.arange(slots)
    before = summed(state, every).numbers
    for index, row in enumerate(rows):
        slot, byte = draw.randrange(slots), draw.randrange(256)
        kept = row.clone()
        row[slot, byte : byte + draw.choice([1, 8, 256])] ^= draw.randrange(1, 256)
        found = summed(state, every).numbers
        assert state.sources.changed(before[slot], found[slot]) == [index]
        row.copy_(kept)


@pytest.mark.parametrize("text", ["", "half", "-1%", "101%", "1", "64MiB"])
def test_other_texts_say_what_is_meant(text):
    """With what was got."""
    with pytest.raises(ConfigError, match=r"CANARY_MEMORY must be a share of the pool such as 1%, or exact, got"):
        CanaryConfig.load(memory=text or " ")
