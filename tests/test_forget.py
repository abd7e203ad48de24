"""Slots whose bytes arrived from elsewhere."""

import torch
from support.toy import ToyEngine

from canary_core import Canary, CanaryConfig


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
    canary.forget_slots("full", torch.arange(1, 64))
    canary.clear_slots("full", torch.arange(1, 64))
    again.submit("a", [5, 6, 7])
    step = again.batch()
    canary.pre_forward(step)
    again.forward(step)
    canary.post_forward(step)
    canary.drain()
    assert canary.stats()["violations"] == 0
    assert canary.stats()["recorded_slots"] == 3
