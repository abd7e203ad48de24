"""The host's twin gives the device's fingerprints, and records travel with bytes: to host memory, to other slots, to
another Canary."""

import pickle

import numpy as np
import pytest
import torch
from ops.scenario import disturb, history, scenario, write
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import AttachError, Kind, State
from canary_core.ops.backends import Backend, torch_backend, triton_backend
from canary_core.ops.payload import PayloadLayout, check_payload, export_records, fingerprint_bytes, import_records
from canary_core.records import FREED_BY, PAYLOAD_RECORD, POSITION, STATES, STEP_FREED, STEP_WRITTEN, WRITER
from canary_core.testing import read_bytes, write_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Parks(Guarded):
    """A guarded toy engine with a host tier."""

    def __init__(self, device: str = "cpu", **settings: object) -> None:
        self.device = device
        super().__init__(ToyEngine(device=device), **{"scrub_budget": "1MiB", **settings})

    def step(self, chunk: int = 8) -> None:
        super().step(chunk)
        self.canary.drain()

    def sources(self):
        return self.canary.states["full"].sources

    def park(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """The bytes of slots, as a host tier keeps them."""
        return {s.name: read_bytes(s, slots).cpu() for s in self.sources()}

    def load(self, slots: torch.Tensor, parked: dict[str, torch.Tensor]) -> None:
        for source in self.sources():
            write_bytes(source, slots, parked[source.name].to(slots.device))


def served(device: str = "cpu", **settings: object) -> Parks:
    """An engine that has served one request of 12 tokens, in slots 1 to 12."""
    guarded = Parks(device, **settings)
    guarded.engine.submit("a", list(range(5, 17)))
    guarded.step()
    guarded.step(chunk=4)
    assert guarded.violations == []
    return guarded


def slots_of(guarded: Parks, *numbers: int) -> torch.Tensor:
    """Slot numbers on the engine's device."""
    return torch.tensor(numbers, device=guarded.device)


def fingerprints_of(backend: Backend, seed: int, device: str) -> None:
    """Compares the twin with what ``backend`` has for all slots of a random region."""
    s = scenario(seed, device)
    state = s.state(bytes="all" if seed % 4 else "partial")
    batches = history(s, steps=1)
    state.require_capacity(batches[0][0])
    write(s)
    disturb(s, state)
    backend.baseline(state)
    slots = torch.arange(s.region.slots, device=device)
    for column, source in enumerate(state.sources):
        there = slots[slots % source.page_size < source.present]
        data = read_bytes(source, there)
        expected = state.fingerprints[there, column].cpu()
        for same in (data, data.cpu(), data.cpu().numpy()):
            found = fingerprint_bytes(same, source.chunk_bytes, column, state.sources.fingerprint_keys).cpu()
            assert torch.equal(found, expected), f"seed {seed}, {source.name}"


@pytest.mark.parametrize("seed", range(40))
def test_the_twin_equals_the_reference(seed):
    """On random layouts, from a tensor or a numpy array."""
    fingerprints_of(torch_backend(), seed, "cpu")


@pytest.mark.parametrize("seed", range(4))
def test_the_twin_equals_the_kernels(seed):
    """The same, on the interpreter."""
    fingerprints_of(triton_backend(), seed, "cpu")


@pytest.mark.gpu
def test_the_twin_equals_the_kernels_on_the_gpu():
    """The same, compiled."""
    for seed in range(60):
        fingerprints_of(triton_backend(), seed, "cuda")


def test_any_dtype_or_memory_will_do():
    """Raw bytes count, whatever they are typed as; memory may be read-only, a strided view, or begin anywhere."""
    rows = torch.randint(0, 256, (5, 40), dtype=torch.uint8)
    expected = fingerprint_bytes(rows, 40, 3)
    message = b"head!" + rows.numpy().tobytes()
    strided = torch.zeros(5, 64, dtype=torch.uint8)
    strided[:, 7:47] = rows
    for same in (
        rows.view(torch.bfloat16),
        rows.view(torch.int64).view(5, 5, 1),
        np.frombuffer(message, dtype=np.uint8, offset=5).reshape(5, 40),
        strided[:, 7:47],
        torch.frombuffer(bytearray(message), dtype=torch.uint8)[5:].view(5, 40),
    ):
        assert torch.equal(fingerprint_bytes(same, 40, 3), expected)
    assert fingerprint_bytes(rows[:0], 40, 3).shape == (0,)
    with pytest.raises(AttachError, match="40 bytes has no whole number of chunks of 12"):
        fingerprint_bytes(rows, 12, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_parked_bytes_come_back_as_what_they_were(device):
    """Bytes and payload go to the host and back to other slots: there they are read as the request's own, and no
    finding arises; the copy is compared as the original was."""
    g = served(device)
    old, new = slots_of(g, *range(1, 13)), slots_of(g, *range(40, 52))
    parked, payload = g.park(old), g.canary.slots.export_records("full", old).cpu()
    assert payload.shape == (12, g.canary.slots.payload_layout("full").words)
    check = check_payload(g.canary.slots.payload_layout("full"), payload, parked)
    assert (check.differences, check.checked, check.skipped) == ((), 48, 0)
    g.canary.slots.clear("full", old)
    g.load(new, parked)
    g.canary.slots.import_records("full", new, payload)
    (request,) = g.engine.requests
    request.slots = new.tolist()
    request.tokens += [90, 91]
    before = g.canary.stats()["checked_bytes"]
    g.step()
    assert g.violations == []
    assert g.canary.stats()["checked_bytes"] > before
    assert g.canary.stats()["unknown_slots"] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_flip_in_parked_memory_is_found(device):
    """By the host before the load, and by the device after it, in the second scrub, since the first one lists what has
    arrived: slot and source are named, and who wrote it when."""
    g = served(device)
    old, new = slots_of(g, *range(1, 13)), slots_of(g, *range(40, 52))
    parked, payload = g.park(old), g.canary.slots.export_records("full", old).cpu()
    parked["v.1"][7, 11] ^= 4
    (difference,) = check_payload(g.canary.slots.payload_layout("full"), payload, parked).differences
    assert (difference.row, difference.source) == (7, "v.1")
    assert (difference.token, difference.position) == (12, 7)
    assert (g.engine.writers.name(difference.writer), difference.step_written) == ("a", 1)
    g.load(new, parked)
    g.canary.slots.import_records("full", new, payload)
    g.engine.requests.clear()
    g.engine.submit("b", [1, 2])
    g.step(chunk=1)
    g.step(chunk=1)
    (found,) = g.violations
    assert (found.kind, found.slot, found.source) == (Kind.BYTES, 47, "v.1")
    assert (found.stored_request, found.step_written) == ("a", 1)
    assert (found.stored_value, found.found_value) == (difference.stored_value, difference.found_value)


def test_another_canary_takes_records_but_not_names():
    """Over a wire: the layout pickles, tokens, positions, hashes and fingerprints hold, writers and steps don't."""
    sender, receiver = served(), Parks()
    old, new = torch.arange(1, 13), torch.arange(30, 42)
    layout = pickle.loads(pickle.dumps(sender.canary.slots.payload_layout("full")))
    parked, payload = sender.park(old), sender.canary.slots.export_records("full", old)
    assert check_payload(layout, payload, parked).differences == ()
    receiver.load(new, parked)
    receiver.canary.slots.import_records("full", new, payload)
    request = receiver.engine.submit("theirs", [*range(5, 17), 90], prefix=12)
    request.slots = new.tolist()
    receiver.step()
    assert receiver.violations == []
    state = receiver.canary.states["full"]
    assert state.records[new, WRITER].tolist() == [-1] * 12
    assert state.records[new, STEP_WRITTEN].tolist() == [1] * 12
    receiver.canary.slots.import_records("full", new, payload, writer=7)
    assert state.records[new, WRITER].tolist() == [7] * 12
    assert sender.canary.states["full"].records[old, WRITER].min() >= 0


def test_a_payload_that_does_not_fit_is_unknown_not_wrong():
    """Of other sources, of none, or all zeros: the slots are not judged, and none of them is a finding."""
    receiver = Parks()
    partial = served(bytes="partial").canary.slots.export_records("full", torch.arange(1, 5))
    off = served(bytes="off").canary.slots.export_records("full", torch.arange(1, 5))
    nothing = torch.zeros(4, receiver.canary.slots.payload_layout("full").words, dtype=torch.int64)
    slots = torch.arange(10, 14)
    for payload in (partial, off, nothing, served(mode="off").canary.slots.export_records("full", slots)):
        receiver.canary.slots.import_records("full", slots, payload)
        words = receiver.canary.states["full"].records[slots, POSITION]
        assert (words % STATES).tolist() == [int(State.UNKNOWN)] * 4
    request = receiver.engine.submit("x", [7] * 5, prefix=4)
    request.slots = slots.tolist()
    receiver.step()
    assert receiver.violations == []
    assert receiver.canary.stats()["unknown_slots"] == 4


def test_partial_bytes_are_checked_as_far_as_they_go():
    """With the first bytes only, whole parked rows may be given; a flip behind them is beyond what is known."""
    g = served(bytes="partial")
    slots = torch.arange(1, 13)
    layout, payload = g.canary.slots.payload_layout("full"), g.canary.slots.export_records("full", slots)
    whole = {s.name: read_bytes(s, slots) for s in g.engine.region().sources}
    whole["k.0"][3, 20] ^= 1
    assert check_payload(layout, payload, whole).differences == ()
    whole["k.0"][3, 15] ^= 1
    assert [d.row for d in check_payload(layout, payload, whole).differences] == [3]


def test_numbers_that_are_no_slots_are_left_out():
    """Padding and overrun, in exports, imports, copies and marks: no other slot is touched, nothing raises."""
    g = served()
    state = g.canary.states["full"]
    before = state.records.clone(), state.fingerprints.clone()
    payload = g.canary.slots.export_records("full", torch.tensor([-1, 3, 64, 1 << 40]))
    assert payload[[0, 2, 3]].abs().sum() == 0
    for nowhere in (torch.tensor([-1, 64]), torch.tensor([], dtype=torch.int64)):
        g.canary.slots.import_records("full", nowhere, payload[: len(nowhere)])
        g.canary.slots.copy("full", nowhere, nowhere)
        g.canary.slots.forget("full", nowhere)
        g.canary.slots.clear("full", nowhere)
    assert torch.equal(state.records, before[0])
    assert torch.equal(state.fingerprints, before[1])
    g.canary.slots.import_records("full", torch.tensor([-1, 20, 99, -7]), payload)
    state.records[20, POSITION] -= int(State.ARRIVED)
    assert torch.equal(state.records[20], before[0][3])
    state.records[20] = 0
    state.fingerprints[20] = before[1][20]
    assert torch.equal(state.records, before[0])
    assert torch.equal(state.fingerprints, before[1])


def test_freed_or_not_is_the_slots_own():
    """A payload taken from a slot that is freed meanwhile says nothing of its new place; a slot that is free stays so,
    though bytes arrive in it."""
    g = served()
    state = g.canary.states["full"]
    g.canary.slots.free("full", torch.tensor([2, 3]), writer=9)
    g.canary.drain()
    import_records(state, torch.tensor([20]), export_records(state, torch.tensor([2])))
    assert state.records[20, POSITION] == 1 * STATES + State.WRITTEN + State.ARRIVED
    assert state.records[20, [STEP_FREED, FREED_BY]].tolist() == [0, 0]
    import_records(state, torch.tensor([3]), export_records(state, torch.tensor([5])))
    assert state.records[3, POSITION] == 4 * STATES + State.WRITTEN + State.FREED + State.ARRIVED
    assert state.records[3, FREED_BY] == 9


@pytest.mark.parametrize("arrival", ["import", "copy", "forget"])
def test_content_that_arrives_after_an_allocation_stays(arrival):
    """Events of the allocator wait for the next forward; what arrives in a slot that was handed out just before must
    wait behind them, or it would be taken for an empty slot."""
    g = served()
    old, new = torch.arange(1, 13), torch.arange(40, 52)
    parked, payload = g.park(old), g.canary.slots.export_records("full", old)
    g.canary.slots.alloc("full", new, writer=0)
    g.load(new, parked)
    if arrival == "import":
        g.canary.slots.import_records("full", new, payload)
    elif arrival == "copy":
        g.canary.slots.copy("full", old, new)
    else:
        g.canary.slots.forget("full", new)
    again = g.canary.slots.export_records("full", new)
    again[:, PAYLOAD_RECORD] &= ~(int(State.ARRIVED) << 32)
    assert torch.equal(again[:, 1:], payload[:, 1:]) == (arrival != "forget")
    (request,) = g.engine.requests
    request.slots = new.tolist()
    request.tokens.append(90)
    g.step()
    assert g.violations == []


def test_slots_without_bytes_have_no_fingerprint():
    """A cache that grows: a fingerprint is carried only where there are bytes, and bytes that come without one are not
    compared. What the slot holds is known all the same."""
    s = next(s for s in map(scenario, range(100)) if any(x.present < x.page_size for x in s.region.sources))
    state = s.state()
    column = next(i for i, x in enumerate(state.sources) if x.present < x.page_size)
    state.records[:, POSITION] = int(State.WRITTEN)
    payload = export_records(state, torch.tensor([2, 3]))
    assert payload[0, 5 + column] != 0
    assert payload[1, 5 + column] == 0
    import_records(state, torch.tensor([6, 7]), payload)
    assert state.records[[6, 7], POSITION].tolist() == [State.WRITTEN + State.ARRIVED] * 2
    import_records(state, torch.tensor([10]), payload[1:])
    assert state.records[10, POSITION] == State.WRITTEN + State.ARRIVED
    assert state.fingerprints[10, column] == 0


def test_a_slot_whose_bytes_are_not_known_stays_what_it_is_when_it_moves():
    """As of a recurrent state in a step that isn't looked at: whoever reads the copy as something else is told of it,
    its bytes are not judged."""
    g = served()
    state = g.canary.states["full"]
    old, new = torch.arange(1, 13), torch.arange(20, 32)
    state.fingerprints[old] = 0
    g.canary.slots.copy("full", old, new)
    assert (state.records[new, POSITION] % STATES).tolist() == [State.WRITTEN + State.ARRIVED] * 12
    state.records[new, POSITION] &= ~int(State.ARRIVED)
    assert torch.equal(state.records[new], state.records[old])
    g.canary.slots.check("full", new)
    g.canary.drain()
    assert g.violations == []


def test_what_does_not_belong_is_said():
    """Names, sizes and shapes that don't fit the payload are errors that say so."""
    g = served()
    layout, payload = g.canary.slots.payload_layout("full"), g.canary.slots.export_records("full", torch.arange(1, 4))
    rows = torch.zeros(3, 48, dtype=torch.uint8)
    with pytest.raises(AttachError, match=r"no source 'k.7' in this payload; its sources are k.0, v.0"):
        check_payload(layout, payload, {"k.7": rows})
    with pytest.raises(AttachError, match=r"k.0: 3 slots of 48 bytes are needed, got \(3, 40\)"):
        check_payload(layout, payload, {"k.0": rows[:, :40]})
    with pytest.raises(AttachError, match=r"payload must be \[n, 9\] for this layout, got \(3, 8\)"):
        check_payload(layout, payload[:, 1:], {})
    assert PayloadLayout.of(g.canary.states["full"]).stamp == int(payload[0, 0])
