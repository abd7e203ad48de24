"""Incidents on a GPU: what a finding starts waits for nothing, and the diagnosis is the one of a CPU."""

import pytest
import torch
from gpu.engine import no_waiting
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_desk.incidents.bundle import read_bundle
from canary_desk.incidents.evidence import take

pytestmark = pytest.mark.gpu


@pytest.fixture
def broken(tmp_path):
    """A toy engine on the GPU in which one bit was flipped."""
    engine = ToyEngine(layers=4, device="cuda")
    guarded = Guarded(engine, read_check=-1, read_interval=1, incident_dir=str(tmp_path))
    request = guarded.submit("a", 20)
    for _ in range(3):
        guarded.step(8)
    engine.v[2].view(torch.int32)[request.slots[7], 5] ^= 1 << 22
    for _ in range(3):
        guarded.decode()
    guarded.canary.drain()
    return guarded


def test_a_flipped_bit_is_diagnosed(broken, tmp_path):
    """With the value that the word had, and a bundle on the disk."""
    (incident,) = broken.canary.incidents
    assert (incident.diagnoses[0].name, incident.diagnoses[0].sure) == ("flipped_bit", "certain")
    (path,) = tmp_path.iterdir()
    assert read_bundle(path).diagnoses[0].name == "flipped_bit"


def test_evidence_is_taken_without_a_wait(broken):
    """No operation of it waits for the device, once what it needs was made."""
    (incident,) = broken.canary.incidents
    state = broken.canary.states["full"]
    history = broken.canary.journal.of("full")
    view = broken.canary.step.last_view
    torch.cuda.synchronize()
    with no_waiting():
        taken = take(state, incident, history, broken.engine.writers.known("a"), view)
    evidence = taken.evidence()
    assert evidence.table is not None
    assert [h.event for h in evidence.lives[incident.root.slot]] == ["write"]
    assert bool(evidence.differs.any())
