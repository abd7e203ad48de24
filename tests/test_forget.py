"""Slots whose bytes arrived from elsewhere."""

import pytest
import torch
from support.toy import ToyEngine

from canary_core import Canary, CanaryConfig, Kind, State, Violation, hookimpl, plugins
from canary_core.records import POSITION, STATES, Phase


def test_a_forgotten_slot_is_not_judged_by_what_it_held_at_attach():
    """A pool that already held the very bytes that are written next raises no lost write once they were forgotten."""
    first = ToyEngine()
    first.submit("a", [5, 6, 7])
    batch = first.batch()
    first.forward(batch)
    again = ToyEngine()
    for layer in range(len(again.k)):
        again.k[layer].copy_(first.k[layer])
        again.v[layer].copy_(first.v[layer])
    canary = Canary([again.region()], CanaryConfig.load(read_check=-1), writers=again.writers)
    canary.slots.forget("full", torch.arange(1, 64))
    canary.slots.clear("full", torch.arange(1, 64))
    again.submit("a", [5, 6, 7])
    again.step(canary)
    canary.drain()
    assert canary.stats()["violations"] == 0
    assert canary.stats()["recorded_slots"] == 3


@pytest.mark.parametrize(("event", "left"), [("forget", State.UNKNOWN), ("clear", State.UNWRITTEN)])
def test_all_slots_of_a_region_need_no_list(event, left):
    """None says of every slot what a list of all of them says: written, handed out, freed, and never touched ones."""
    records = []
    for listed in (True, False):
        engine = ToyEngine()
        engine.submit("a", [5, 6, 7])
        canary = Canary([engine.region()], CanaryConfig.load(scrub_budget="0", mode="log"), writers=engine.writers)
        engine.step(canary)
        canary.slots.alloc("full", torch.tensor([8, 9]))
        canary.slots.free("full", torch.tensor([2, 9]))
        state = canary.states["full"]
        getattr(canary.slots, event)("full", torch.arange(state.region.slots) if listed else None)
        canary.drain()
        records.append((state.records.clone(), state.fingerprints.clone()))
    for by_list, at_once in zip(*records, strict=True):
        assert torch.equal(by_list, at_once)
    assert (records[1][0][:, POSITION] % STATES).unique().tolist() == [left]


def test_expected_slots_are_not_judged_while_events_wait():
    """Slots whose bytes will arrive from elsewhere are left alone at once, even before the events that wait; a slot
    that was freed stays so."""
    engine = ToyEngine()
    engine.submit("a", [5, 6, 7])
    config = CanaryConfig.load(read_check=-1, scrub_budget="1MiB", mode="log")
    canary = Canary([engine.region()], config, writers=engine.writers)
    engine.step(canary)
    states = canary.states["full"].records[:, POSITION] % STATES
    assert states[1:4].tolist() == [State.WRITTEN] * 3
    canary.slots.free("full", torch.tensor([1]))
    canary.slots.check("full", torch.tensor([1, 2, 3]))
    canary.drain()
    canary.slots.free("full", torch.tensor([2]))
    canary.slots.expect("full", torch.tensor([1, 2, 99]))
    states = canary.states["full"].records[:, POSITION] % STATES
    assert states[1:4].tolist() == [State.UNKNOWN | State.FREED, State.UNKNOWN, State.WRITTEN]
    for layer in engine.k:
        layer[1:3] += 1
    canary.slots.check("full", torch.tensor([1, 2, 3, -1, 99]))
    canary.drain()
    assert canary.stats()["violations"] == 0


def test_slots_that_hold_nothing_may_be_expected():
    """Bytes are announced for slots that the allocator has just handed out, and for ones that nobody ever had, before
    the allocator's own events take effect: those find the slots as they were, and what arrives is not judged."""
    engine = ToyEngine()
    canary = Canary([engine.region()], CanaryConfig.load(scrub_budget="0", mode="log"), writers=engine.writers)
    records = canary.states["full"].records
    canary.slots.alloc("full", torch.tensor([1]))
    canary.slots.settle()
    canary.slots.alloc("full", torch.tensor([2, 3]))
    canary.slots.expect("full", torch.tensor([1, 2]))
    assert (records[1:4, POSITION] % STATES).tolist() == [State.ALLOCATED, State.UNWRITTEN, State.UNWRITTEN]
    canary.slots.forget("full", torch.tensor([1, 2]))
    canary.drain()
    assert (records[1:4, POSITION] % STATES).tolist() == [State.UNKNOWN, State.UNKNOWN, State.ALLOCATED]
    assert canary.stats()["violations"] == 0


def test_slots_are_checked_on_demand():
    """`check_slots` finds the layer and half of a changed slot at once, and looks at no other."""
    engine = ToyEngine()
    engine.submit("a", [5, 6, 7])
    canary = Canary([engine.region()], CanaryConfig.load(scrub_budget="0", mode="log"), writers=engine.writers)
    engine.step(canary)
    found: list[Violation] = []

    class Collector:
        @hookimpl
        def canary_violation(self, violation):
            found.append(violation)

    plugins.hook_manager().register(Collector(), name="collector")
    try:
        engine.v[1].view(-1)[engine.v[1][0].numel() * 2] += 1
        engine.k[0].view(-1)[engine.k[0][0].numel() * 3] += 1
        canary.slots.check("full", torch.tensor([1, 2]))
        canary.drain()
    finally:
        plugins.hook_manager().unregister(name="collector")
    assert [(v.kind, v.slot, v.layer, v.half, v.phase) for v in found] == [(Kind.BYTES, 2, 1, "v", Phase.EVENT)]


def test_forgotten_bytes_leave_the_record_and_numbers_that_are_no_slots_are_left_out():
    """What was written there is still known, its bytes are not; other slots keep both."""
    engine = ToyEngine()
    engine.submit("a", [5, 6, 7])
    canary = Canary([engine.region()], CanaryConfig.load(scrub_budget="0", mode="log"), writers=engine.writers)
    engine.step(canary)
    state = canary.states["full"]
    records, fingerprints = state.records.clone(), state.fingerprints.clone()
    written = (records[:, POSITION] % STATES == State.WRITTEN).nonzero().flatten()
    canary.slots.forget_bytes("full", torch.tensor([-1, int(written[0]), 10_000, -1]))
    canary.slots.forget_bytes("full", torch.tensor([-1, 10_000]))
    canary.slots.forget_bytes("full", torch.tensor([], dtype=torch.int64))
    fingerprints[written[0]] = 0
    assert torch.equal(state.records, records)
    assert torch.equal(state.fingerprints, fingerprints)
