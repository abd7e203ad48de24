"""`Place`: whose silence it is, in each event, metric and bundle."""

import socket

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import CanaryConfig
from canary_core.config.faults import FaultSpec
from canary_core.place import Place
from canary_desk.metrics.readings import MetricReading


def test_it_says_which_process_of_which_engine_on_which_machine():
    """A draft model's own name wins over the served one; on a CPU there is no GPU."""
    config = CanaryConfig.load(replica=3, rank=1, served_model="llama")
    place = Place.of(config, torch.device("cpu"))
    known = {"host": socket.gethostname(), "model": "llama", "replica": 3, "rank": 1}
    assert place.fields() == known
    assert place.labels == ("3", "1", "llama")
    draft = Place.of(config.model_copy(update={"model": "draft"}), torch.device("cpu"))
    assert draft.fields() == {**known, "model": "draft"}


@pytest.mark.gpu
def test_a_gpu_is_told_as_its_driver_does():
    """By UUID and address on the bus."""
    place = Place.of(CanaryConfig.load(), torch.device("cuda", torch.cuda.current_device()))
    assert place.gpu.startswith("GPU-")
    assert len(place.gpu) == len("GPU-c876a9b7-d88d-44fb-b221-9ab4a8a1e00e")
    assert place.pci.count(":") == 2
    assert place.fields()["gpu"] == place.gpu


def test_every_event_and_metric_says_so():
    """Those of the start, of findings, and of the end."""
    guarded = Guarded(replica=2, rank=1, served_model="m", read_check=-1)
    guarded.submit()
    guarded.step()
    guarded.engine.k[1][2, 3] += 1
    for _ in range(3):
        guarded.decode()
    reading = MetricReading.of(guarded.canary)
    guarded.canary.close()
    names = {event.name for event in guarded.findings.events}
    assert {"attached", "coverage", "incident", "diagnosis", "summary"} <= names
    place = guarded.canary.place.fields()
    for event in guarded.findings.events:
        assert place.items() <= event.fields.items()
    assert reading.owner == ("2", "1", "m")
    assert reading.info[0] == socket.gethostname()


@pytest.mark.parametrize(("replica", "hit"), [(0, False), (1, True)])
def test_a_fault_may_aim_at_one_replica(replica, hit):
    """As at one rank."""
    assert FaultSpec.parse("real_kv_used:replica=1").replica == 1
    guarded = Guarded(ToyEngine(), faults="real_kv_used:replica=1", replica=replica, read_check=-1)
    guarded.submit(tokens=6)
    for _ in range(4):
        guarded.decode()
    guarded.canary.drain()
    assert bool(guarded.findings.told("fault_injected")) == hit
    assert bool(guarded.violations) == hit
