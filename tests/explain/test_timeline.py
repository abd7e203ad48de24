"""The timeline of a slot: the device's notes, the host's calls, the record and the findings, each event once."""

from dataclasses import replace

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core.runtime.journal import Entry
from canary_desk.explain import tell
from canary_desk.explain.timeline import timeline
from canary_desk.incidents.bundle import read_bundle


@pytest.fixture
def bundle(tmp_path):
    """Of a slot that two requests had, one after the other, and in which a bit flipped in the end."""
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, incident_dir=str(tmp_path))
    slots, ids = guarded.canary.slots, guarded.engine.writers.id
    slots.alloc("full", torch.arange(1, 20), ids("ann"))
    ann = guarded.submit("ann", 8)
    guarded.step(8)
    own = torch.tensor(ann.slots)
    guarded.engine.requests.remove(ann)
    slots.park("full", own, ids("ann"))
    slots.evict("full", own)
    slots.alloc("full", own, ids("bob"))
    guarded.engine.free[:0] = ann.slots
    bob = guarded.submit("bob", 8)
    guarded.step(8)
    guarded.engine.k[1].view(torch.int32)[bob.slots[5], 3] ^= 1 << 30
    guarded.decode()
    guarded.canary.close()
    (path,) = tmp_path.iterdir()
    return read_bundle(path)


def told(bundle, evidence=None):
    """Step and text of each line."""
    evidence = evidence or bundle.evidence
    return [(m.step, m.sort, m.text) for m in timeline(bundle.rebuilt(), evidence)]


LAST = [
    (1, "free", "let go of by ann, kept by the prefix cache, with 7 others"),
    (1, "free", "evicted from the prefix cache, with 7 others"),
    (1, "event", "handed out to bob, with 7 others"),
    (2, "write", "written by bob as position 5"),
    (3, "finding", "found: bytes in k.1, about to be read by bob"),
]
"""What the device noted, with what the host knows of it, and the finding."""


def test_each_event_is_told_once_in_order(bundle):
    """The device's four last ones, in its order, each with how many others the call was about and the record's
    position; before them the host's older call."""
    assert told(bundle) == [(0, "event", "handed out, ann, with 18 others"), *LAST]
    assert [(m.step, m.sort, m.text) for m in tell(bundle).timeline] == told(bundle)


def test_the_devices_notes_are_the_sure_ones(bundle):
    """On a GPU the host's lists may have changed since: a call that the device did not note is not told, nor one whose
    slots were not kept; an older one is, with a doubt."""
    evidence = bundle.evidence
    unsure = [replace(entry, sure=False) for entry in evidence.history]
    changed = Entry(1, "share", "full", 3, 0, unsure[0].slots, sure=False)
    lost = Entry(1, "free", "full", 900, 0, None, sure=False)
    lines = told(bundle, replace(evidence, history=[*unsure, changed, lost]))
    doubt = "(by the engine's own list, which may have changed since)"
    assert lines == [(0, "event", f"handed out, ann, with 18 others {doubt}"), *LAST]
    few = {slot: life[-2:] for slot, life in evidence.lives.items()}
    # Less than four: that is all that ever happened to the slot.
    assert told(bundle, replace(evidence, history=unsure, lives=few)) == LAST[2:]


def test_without_the_devices_notes_the_host_tells(bundle):
    """A bundle of an older Canary has none: calls and the record, in the order of steps."""
    lines = told(bundle, replace(bundle.evidence, lives={}))
    assert lines == [
        (0, "event", "handed out, ann, with 18 others"),
        (1, "event", "let go of, kept by the prefix cache, ann, with 7 others"),
        (1, "event", "evicted from the prefix cache, with 7 others"),
        (1, "event", "handed out, bob, with 7 others"),
        (2, "write", "written by bob as position 5"),
        LAST[-1],
    ]


def test_copies_and_roll_backs_are_told(tmp_path):
    """Where a slot's content came from, and that all slots were emptied before."""
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, incident_dir=str(tmp_path))
    slots = guarded.canary.slots
    slots.clear("full", None)
    request = guarded.submit("ann", 8)
    guarded.step(8)
    source, copy = torch.tensor(request.slots[5:6]), torch.tensor([40])
    for layer in (*guarded.engine.k, *guarded.engine.v):
        layer[copy] = layer[source]
    slots.copy("full", source, copy)
    request.slots[5] = 40
    guarded.engine.k[1].view(torch.int32)[40, 3] ^= 1 << 30
    guarded.decode()
    guarded.canary.close()
    (path,) = tmp_path.iterdir()
    assert told(read_bundle(path)) == [
        (0, "event", "cleared (all slots)"),
        (1, "write", "written in another slot by ann as position 5"),
        (1, "event", f"copied here from slot {int(source)}"),
        (2, "finding", "found: bytes in k.1, about to be read by ann"),
    ]
