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


@pytest.fixture(params=["k v", "k+v"])
def halves(request):
    """Groups of K and groups of V, or of both together."""
    return request.param.split()


@pytest.fixture
def shared(monkeypatch, halves):
    """However small the pool; up to three layers in a group."""
    monkeypatch.setattr(sums, "FREE_BYTES", 0)
    monkeypatch.setattr(sums, "MOST_PARTS", 3)
    monkeypatch.setattr(sums, "MOST_LAYERS", 3 if halves == ["k+v"] else 0)


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


def said(guarded):
    """The sentences of the last incident's diagnoses."""
    return " ".join(map(str, guarded.findings.incidents[-1].diagnoses))


def tensors(guarded):
    """The pool's tensors by source."""
    engine = guarded.engine
    return {f"{half}.{n}": getattr(engine, half)[n] for n in range(LAYERS) for half in "kv"}


def lose(guarded, names):
    """The next forwards leave the sources ``names`` as they were."""

    def without(batch):
        slots = batch.tables["full"].write_slots.long()
        before = {name: tensors(guarded)[name][slots].clone() for name in names}
        ToyEngine.forward(guarded.engine, batch)
        for name in names:
            tensors(guarded)[name][slots] = before[name]

    guarded.engine.forward = without


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


def test_of_two_damaged_layers_of_a_group_the_group_is_named(guarded, halves):
    """And both layers where they are of two groups. The diagnosis doesn't say of any layer that it is damaged, nor of
    K or V where both share."""
    k, slot = guarded.engine.k, guarded.request.slots[2]
    kept = k[2][slot].clone()
    k[0][slot] += 1
    k[2][slot] += 1
    if halves == ["k", "v"]:
        group, half, names = "k.0..2", "k", ("k.0", "k.1", "k.2")
    else:
        group, half, names = "k+v.0..2", None, ("k.0", "v.0", "k.1", "v.1", "k.2", "v.2")
    assert told(guarded) == {(Kind.BYTES, group, None, half)}
    assert {v.sources for v in guarded.violations} == {names}
    assert f"of {group} ({len(names)}), which share fingerprints, several differ, and nothing says which" in said(
        guarded
    )
    assert f"1 slots, up to {len(names)} of {2 * LAYERS} sources are damaged" in said(guarded)
    k[2][slot] = kept
    k[4][slot] += 1
    assert told(guarded) == {(Kind.BYTES, "k.0", 0, "k"), (Kind.BYTES, "k.4", 4, "k")}


def test_damaged_k_and_v_of_a_layer_are_named_or_told_as_a_group(guarded, halves):
    """Each by itself where each half has groups of its own."""
    slot = guarded.request.slots[2]
    guarded.engine.k[1][slot] += 1
    guarded.engine.v[1][slot] += 1
    apart = {(Kind.BYTES, "k.1", 1, "k"), (Kind.BYTES, "v.1", 1, "v")}
    assert told(guarded) == (apart if halves == ["k", "v"] else {(Kind.BYTES, "k+v.0..2", None, None)})


def test_of_one_half_in_all_layers_no_more_is_said_than_is_known(guarded, halves):
    """Not that all layers of K are damaged where two of each group are."""
    for layer in (0, 1, 3, 4):
        guarded.engine.k[layer][guarded.request.slots[2]] += 1
    told(guarded)
    (incident,) = guarded.findings.incidents
    found = {d.name: d for d in incident.diagnoses}
    assert ("one_half" in found) == (halves == ["k", "v"])
    if halves == ["k", "v"]:
        assert found["one_half"].sure == "possible"
        assert f"only k differs, in up to {LAYERS} layers" in str(found["one_half"])


def test_the_same_bit_flipped_both_ways_in_two_layers_is_seen(guarded, halves):
    """The first number of the group stays."""
    slot, bit = guarded.request.slots[2], 1 << 4
    for layer, value in ((0, 0), (1, bit)):
        guarded.engine.k[layer].view(torch.int32)[slot, 1] = value
    guarded.canary.slots.adopt_bytes("full", torch.tensor([slot]))
    for layer in (0, 1):
        guarded.engine.k[layer].view(torch.int32)[slot, 1] ^= bit
    assert told(guarded) == {(Kind.BYTES, f"{halves[0]}.0..2", None, "k" if len(halves) > 1 else None)}


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


def test_a_write_lost_in_all_layers_is_told_and_in_one_layer_it_is_said_that_it_is_not(guarded, halves):
    """By the coverage, which names what to set. So with V where it shares with K: see below."""
    lose(guarded, ["k.1"])
    assert told(guarded) == set()
    (doubt,) = [u for u in guarded.canary.coverage.uncovered if u.name == "single layers of full"]
    with_halves = "" if len(halves) > 1 else ", with all halves,"
    assert f"up to 3 layers{with_halves} share fingerprints" in doubt.reason
    assert "CANARY_MEMORY=exact" in doubt.reason
    lose(guarded, list(tensors(guarded)))
    assert {kind for kind, *_ in told(guarded)} == {Kind.LOST_WRITE}
    assert {v.source for v in guarded.violations} == {
        f"{half}.{layers}" for half in halves for layers in ("0..2", "3..5")
    }
    guarded.canary.close()
    assert guarded.findings.incidents[-1].diagnoses[0].name == "lost_write"


def test_a_lost_write_of_v_is_told_where_v_has_groups_of_its_own(guarded, halves):
    """And not where it shares with K, which the coverage says."""
    lose(guarded, [name for name in tensors(guarded) if name.startswith("v")])
    lost = {(Kind.LOST_WRITE, "v.0..2", None, "v"), (Kind.LOST_WRITE, "v.3..5", None, "v")}
    assert told(guarded) == (lost if len(halves) > 1 else set())


def test_bytes_in_host_memory_are_checked_by_the_layers_that_share(guarded, halves):
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
    group = {f"{half}.{layer}" for half in ("v" if len(halves) > 1 else "kv") for layer in (3, 4, 5)}
    assert {d.source for d in check_payload(layout, payload, parked).differences} == group
    del parked["v.4"]
    part = check_payload(layout, payload, parked)
    assert (part.differences, part.skipped) == ((), (len(group) - 1) * 4)


def test_a_small_pool_has_a_fingerprint_for_each_layer():
    """What it takes is too little to matter."""
    guarded = Guarded(ToyEngine(layers=LAYERS))
    assert not guarded.canary.states["full"].sources.sums
    assert guarded.canary.states["full"].sources.columns == 2 * LAYERS
    guarded.canary.close()


@pytest.mark.parametrize("name", SHARDS)
def test_memory_is_within_the_setting(name):
    """Of every pool but one, whose records alone are nearly as much."""
    most = 0.0124 if name.startswith("gpt-oss") else 0.01
    assert share(SHARDS[name]) <= most
    assert share(SHARDS[name], memory="2%") <= 0.02
    assert share(SHARDS[name], memory="exact") >= share(SHARDS[name])


SHARD_ROWS = [pytest.param(80, 256, id="70B"), pytest.param(18, 128, id="gpt-oss-120b")]
"""Layers and bytes of a row, of a rank of 8."""


@pytest.mark.parametrize(("layers", "width"), SHARD_ROWS)
@pytest.mark.parametrize("interleaved", [True, False])
def test_every_source_of_a_shard_names_itself(layers, width, interleaved):
    """Whatever changes in one of its sources, the two numbers say in which, in whatever order the engine has them; and
    of a flipped bit, which word it was, and its value before. Of two, no less than both are named."""
    draw, made, slots = Random(3), torch.Generator().manual_seed(3), 8
    order = [(half, layer) for layer in range(layers) for half in "kv"]
    order = order if interleaved else sorted(order)
    rows = [torch.randint(0, 256, (slots, width), dtype=torch.uint8, generator=made) for _ in order]
    sources = tuple(
        KVSource(r, half, layer, chunk_bytes=width, slot_stride_bytes=width)
        for r, (half, layer) in zip(rows, order, strict=True)
    )
    config = CanaryConfig()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "FREE_BYTES", 0)
        state = RegionState(Region("kv", slots, sources), 0, Shared.allocate(config, torch.device("cpu")), config)
    table = state.sources
    fits = 0.01 * len(rows) * width - 48 >= 8 * table.columns
    assert fits or [label.name for label in table.judged] == [f"k+v.0..{layers - 1}"]
    for label, group in zip(table.judged, table.members, strict=True):
        assert label.several == tuple(table[i].name for i in group)
        assert label.half == (table[group[0]].half if fits else None)
    every = torch.arange(slots)
    before = summed(state, every).numbers
    for index, row in enumerate(rows):
        slot, byte = draw.randrange(slots), draw.randrange(width)
        kept = row.clone()
        row[slot, byte : byte + draw.choice([1, 8, width])] ^= draw.randrange(1, 256)
        found = summed(state, every).numbers
        assert table.changed(before[slot], found[slot]) == [index]
        row.copy_(kept)
        word, bit = draw.randrange(width // 4), draw.randrange(32)
        old = int(row.view(torch.int32)[slot, word]) & 0xFFFFFFFF
        row[slot, 4 * word + bit // 8] ^= 1 << bit % 8
        found = summed(state, every).numbers
        assert table.changed(before[slot], found[slot]) == [index]
        column = table.column_of(index)
        by = found[slot, column] - before[slot, column]
        factors = table.keys[: width // 4]
        delta = (1 << bit) if not old >> bit & 1 else -(1 << bit)
        assert (factors * delta == by).nonzero().tolist() == [[word]]
        other = draw.choice([i for i in range(len(rows)) if i != index])
        rows[other][slot, 3] ^= 1
        found = summed(state, every).numbers
        assert {index, other} <= set(table.changed(before[slot], found[slot]))
        rows[other][slot, 3] ^= 1
        row.copy_(kept)


def test_flips_in_a_rank_of_gpt_oss_are_named_by_the_diagnosis(monkeypatch):
    """18 layers with rows of 128 bytes, K and V in one group: layer, half, word, bit and old value of each source."""
    monkeypatch.setattr(sums, "FREE_BYTES", 0)
    draw = Random(5)
    for half, layer in ((half, layer) for layer in range(18) for half in "kv"):
        guarded = Guarded(ToyEngine(layers=18, row_elements=64), read_check=-1, backend="torch")
        request = guarded.submit(tokens=6)
        guarded.step(6)
        assert guarded.canary.states["full"].sources.members == (tuple(range(36)),)
        slot, word, bit = request.slots[draw.randrange(6)], draw.randrange(32), draw.randrange(32)
        tensor = getattr(guarded.engine, half)[layer].view(torch.int32)
        old = int(tensor[slot, word]) & 0xFFFFFFFF
        tensor.view(torch.uint8)[slot, 4 * word + bit // 8] ^= 1 << bit % 8
        assert told(guarded) == {(Kind.BYTES, f"{half}.{layer}", layer, half)}
        guarded.canary.close()
        (incident,) = guarded.findings.incidents
        assert incident.diagnoses[0].name == "flipped_bit"
        assert (
            f"bit {bit} of 32-bit word {word} of slot {slot} in {half}.{layer}: the word was 0x{old:08x} and is "
            f"0x{old ^ 1 << bit:08x}"
        ) in str(incident.diagnoses[0])


@pytest.mark.parametrize("text", ["", "half", "-1%", "101%", "1", "64MiB"])
def test_other_texts_say_what_is_meant(text):
    """With what was got."""
    with pytest.raises(ConfigError, match=r"CANARY_MEMORY must be a share of the pool such as 1%, or exact, got"):
        CanaryConfig.load(memory=text or " ")
