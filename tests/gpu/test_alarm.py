"""The probe of the alarm on a device: beside forwards and within a CUDA graph that was captured before it was asked
for. And a device that stands still."""

import time

import pytest
import torch
from gpu.engine import Run
from gpu.test_graph import ANYWHERE, MODES

from canary_core.guard.reporting import alarm_test, lookout
from canary_core.guard.reporting.read_times import READ_S
from canary_core.runtime.memory_proof import LOOKED_FORWARDS
from canary_core.runtime.watch import WATCH


@pytest.mark.parametrize("mode", ANYWHERE)
def test_probes_come_out_of_the_alarm(mode, monkeypatch):
    """Of each source in turn, as often as they are asked for; nothing is found."""
    monkeypatch.setattr(alarm_test, "LEAST_S", 0.0)
    monkeypatch.setattr(alarm_test, "AGAIN_S", 0.05)
    run = Run(*MODES[mode])
    deadline = time.monotonic() + 60
    while run.canary.stats()["alarm_tests"] < 5 and time.monotonic() < deadline:
        run.clean(4)
        time.sleep(READ_S)
    stats = run.canary.stats()
    assert stats["alarm_tests"] >= 5
    assert stats["alarm_dead"] == stats["violations"] == 0


@pytest.mark.gpu
def test_a_device_that_stands_still_is_told(monkeypatch):
    """The side stream is kept busy, so the copy of the counters does not arrive, while forwards go on."""
    monkeypatch.setattr(lookout, "STUCK_S", 0.05)
    monkeypatch.setattr(lookout, "STUCK_STEPS", 1)
    monkeypatch.setattr(WATCH, "look", lambda: None)
    run = Run(*MODES["gpu_beside"])
    # Whatever later forwards launch is compiled: the first ones launch other kernels, see `MemoryProof`.
    run.clean(LOOKED_FORWARDS + 4)
    told = []
    monkeypatch.setattr(run.canary._switch, "tell", told.append)
    run.stage(run.traffic.next())
    torch.cuda.synchronize()
    with run.canary._workspace.side:
        # A second and more.
        torch.cuda._sleep(3_000_000_000)
    deadline = time.monotonic() + 0.8
    while time.monotonic() < deadline and not told:
        # The same batch again: to make another one would wait for the device.
        run.issue()
        time.sleep(READ_S)
        run.canary._lookout.look(time.monotonic())
    torch.cuda.synchronize()
    assert [event.name for event in told] == ["silence"]
    assert "has not arrived" in told[0].fields["reason"]
