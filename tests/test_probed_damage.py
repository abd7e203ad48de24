"""A probe of the alarm compares a slot with a fingerprint that is wrong on purpose: what is wrong in that slot is told
all the same."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import Kind
from canary_core.records import SCRUB_WORDS, Cursor


@pytest.mark.parametrize("damaged", [False, True])
def test_a_probe_of_a_damaged_parked_slot_does_not_swallow_the_damage(damaged):
    """The only slot with KV is one that the prefix cache keeps, and each scrub is probed in the damaged source: the
    flip is told once, with slot and source, and without one nothing is."""
    guarded = Guarded(ToyEngine(), scrub_budget="1MiB")
    guarded.submit("a", 6)
    guarded.step(6)
    canary, backend = guarded.canary, guarded.canary.slots.workspace.backend
    state = canary.states["full"]
    canary.slots.park("full", torch.tensor([6]))
    canary.slots.free("full", torch.arange(1, 6))
    canary.slots.settle()
    state.cursors[Cursor.SCRUB_SLOTS : Cursor.SCRUB_PASS + 1] = 64  # all of them, as a large budget has it

    def scrub(probed: bool) -> None:
        """One that goes on where the last one ended, as between two forwards."""
        backend.scrub(state, probed)
        state.cursors[Cursor.SCRUB :][:SCRUB_WORDS] = state.cursors[Cursor.SCRUB_NEXT :][:SCRUB_WORDS].clone()

    scrub(False)
    scrub(False)  # what is left is listed now
    if damaged:
        guarded.engine.k[1].view(torch.int16)[6, 5] ^= 1 << 4
    state.cursors[Cursor.PROBE] = 1 + [source.name for source in state.sources].index("k.1")
    for _ in range(3):
        scrub(True)
        canary.drain()
    assert canary.stats()["checked_bytes"] >= 3 * state.sources.slot_bytes
    assert [(v.kind, v.slot, v.source) for v in guarded.violations] == [(Kind.BYTES, 6, "k.1")] * damaged
