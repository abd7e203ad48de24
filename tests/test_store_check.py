"""`StoreCheck`: between a layer's store and the end of the forward nobody else writes to what it stored."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import BatchView, Kind
from canary_core.records import Phase


def run(g: Guarded, batch: BatchView, late: object = None, layers: tuple[int, ...] = (0, 1, 9)) -> None:
    """A forward whose plugin tells that ``layers`` are stored; then ``late`` happens, before the forward ends."""
    g.canary.step.before(batch)
    g.engine.forward(batch)
    for layer in layers:
        g.canary.step.stored(layer)
    if late is not None:
        late()
    g.canary.step.after()
    g.canary.step.end()


def flip(tensor: torch.Tensor, slot: int) -> None:
    """One bit of a slot's bytes."""
    tensor.view(torch.uint8).view(tensor.shape[0], -1)[slot, 1] ^= 4


def more(g: Guarded) -> BatchView:
    """The next decode of all requests."""
    for request in g.engine.requests:
        request.tokens.append(8)
    return g.engine.batch()


def test_a_flip_between_store_and_end_is_told():
    """With layer, half, position and request, and never again: what is there now counts as what the slot holds."""
    g = Guarded(store_check=True, scrub_budget="64MiB")
    g.submit("a", 3)
    g.submit("b", 4)
    batch = g.engine.batch()
    slot = g.engine.requests[1].slots[2]
    run(g, batch, lambda: flip(g.engine.v[1], slot))
    for _ in range(3):
        run(g, more(g))
    g.canary.drain()
    (found,) = g.violations
    assert (found.kind, found.phase, found.region, found.source) == (Kind.BYTES, Phase.POST_FORWARD, "full", "v.1")
    assert (found.slot, found.position, found.request, found.step) == (slot, 2, "b", 1)
    assert (found.stored_request, found.stored_position, found.step_written) == ("b", 2, 1)
    assert found.stored_value != found.found_value


def test_without_it_the_same_flip_is_not_seen():
    """By default the bytes count from the end of the forward on, and nothing is kept for it."""
    g = Guarded(scrub_budget="64MiB")
    g.submit("b", 4)
    batch = g.engine.batch()
    run(g, batch, lambda: flip(g.engine.v[1], g.engine.requests[0].slots[2]))
    run(g, more(g))
    g.canary.drain()
    assert g.violations == []
    assert g.canary.states["full"].stores.numel() == 0
    assert "noted_stores" not in g.canary.stats()


def test_clean_forwards_are_silent():
    """Prefills, chunks and decodes of full and window regions, whose layers are told each."""
    g = Guarded(ToyEngine(window=4), store_check=True)
    g.submit("a", 3)
    g.submit("b", 21)
    for _ in range(3):
        run(g, g.engine.batch())
    for _ in range(6):
        run(g, more(g))
    g.canary.drain()
    assert g.violations == []
    assert g.canary.stats()["noted_stores"] == 9 * 3


def test_layers_of_which_nothing_was_told_are_not_judged():
    """Nor are halves that were not named: they may be stored later."""
    g = Guarded(store_check=True)
    g.submit("a", 3)
    batch = g.engine.batch()
    slot = g.engine.requests[0].slots[0]
    g.canary.step.before(batch)
    g.canary.step.stored(0, ["k"])
    g.engine.forward(batch)
    g.canary.step.stored(0, ["k"])
    flip(g.engine.v[0], slot)
    flip(g.engine.k[1], slot)
    g.canary.step.after()
    g.canary.step.end()
    g.canary.drain()
    assert g.violations == []


@pytest.mark.parametrize("told", [False, True])
def test_what_an_abandoned_forward_stored_says_nothing_of_the_next(told):
    """A forward that failed after its stores, and another one that writes the same slots, told or not."""
    g = Guarded(store_check=True)
    g.submit("a", 3)
    batch = g.engine.batch()
    g.canary.step.before(batch)
    g.engine.forward(batch)
    g.canary.step.stored(0)
    g.canary.step.abandon()
    for tensor in (*g.engine.k, *g.engine.v):
        tensor[g.engine.requests[0].slots] += 1
    g.canary.step.before(batch)
    if told:
        g.canary.step.stored(0)
    g.canary.step.after()
    g.canary.step.end()
    g.canary.drain()
    assert g.violations == []


def test_a_store_may_be_told_for_one_region_only():
    """Of two regions that number their layers alike, only the one that is named counts as stored."""
    g = Guarded(ToyEngine(window=4), store_check=True)
    g.submit("a", 3)
    batch = g.engine.batch()
    g.canary.step.before(batch)
    g.canary.step.stored(9, region="full")
    g.engine.forward(batch)
    noted = [g.canary.step.stores.noted]
    g.canary.step.stored(9, region="window")
    noted.append(g.canary.step.stores.noted)
    flip(g.engine.window_kv[1], int(g.engine.slot_map[g.engine.requests[0].slots[2]]))
    g.canary.step.after()
    g.canary.step.end()
    g.canary.drain()
    assert noted == [0, 1]
    assert [(v.region, v.source, v.position) for v in g.violations] == [("window", "v.9", 2)]


def test_stores_outside_of_a_forward_are_none():
    """An engine warms up, or captures its graphs, without Canary."""
    g = Guarded(store_check=True)
    g.canary.step.stored(0)
    g.canary.step.stored(7)
    assert g.canary.step.stores.noted == 0


def test_thorough_profiles_look_at_stores():
    """``hunt`` and ``ci`` do, ``watch`` does not."""
    on = {name: Guarded(profile=name).canary.step.stores.on for name in ("watch", "hunt", "ci")}
    assert on == {"watch": False, "hunt": True, "ci": True}
