"""Requests asked for by a client's name, of which the engine's name is longer."""

from unittest import mock

import pytest
import torch

from canary_adapters.internal_requests import InternalRequests, RecomputePair, Running, named_like
from canary_adapters.recompute_pairs import RecomputePairs
from canary_adapters.recompute_requests import Recomputes
from canary_adapters.touched_requests import TouchedRequests
from canary_core import Canary, CanaryConfig, KVSource, Region
from canary_core.plugins import private_hooks
from canary_core.testing import Findings

OWN = "cmpl-complaint-0-1a2b3c4d"
RUNNING = [OWN, "complaints-0-12345678", "chatcmpl-other-1a2b3c4d", "chatcmpl-two-0-1a2b3c4d", "cmpl-two-1-1a2b3c4d"]


@pytest.mark.parametrize("name", ["complaint", "cmpl-complaint", "cmpl-complaint-0", OWN])
def test_the_beginning_of_one_name_is_enough(name):
    """Without what vLLM's server puts before it, too."""
    assert named_like(name, RUNNING) == [OWN]


def test_other_names_are_nobodys_or_those_of_several():
    """A beginning ends before a hyphen."""
    assert named_like("compl", RUNNING) == named_like("", RUNNING) == named_like("nobody", RUNNING) == []
    assert named_like("two", RUNNING) == RUNNING[3:]
    assert named_like("a", ["a-1", "a", "a-2"]) == ["a"]


def scheduler() -> Recomputes:
    """Of an engine with requests that run."""
    engine = mock.create_autospec(InternalRequests, instance=True, parked="nothing is remembered")
    engine.running.return_value = [Running(name, 40, 0, 0) for name in RUNNING]
    engine.find.return_value = None
    return Recomputes(engine, TouchedRequests())


@pytest.mark.parametrize(
    ("name", "why", "names"),
    [("two", "several running requests", RUNNING[3:]), ("nobody", "no request of that name", RUNNING)],
)
def test_the_scheduler_says_who_may_have_been_meant(name, why, names):
    """Or who runs at all."""
    asked = scheduler()
    asked.want(name)
    asked.before()
    (told,) = asked.missed()
    assert told.why.startswith(why)
    assert (told.request, told.names, told.asked) == (name, names, True)


@pytest.fixture
def worker():
    """Judges pairs; its canary ends with the test."""
    source = KVSource(torch.zeros(64, 8), "k", 0, chunk_bytes=32, slot_stride_bytes=32, dtype=torch.float32)
    findings = Findings()
    config = CanaryConfig.load(mode="log", silence_s=0, bytes="off")
    canary = Canary([Region("kv", 64, (source,))], config, hooks=private_hooks(findings))
    yield RecomputePairs(canary, [], lambda: 1e-7, lambda: RUNNING), findings
    canary.close()


def test_a_worker_asks_for_the_engines_own_name(worker):
    """Of one request alone; what is unknown or of several is left to the scheduler, whose names the answer lists. The
    event is told once, however many run."""
    pairs, findings = worker
    pairs.ask("complaint")
    asked = pairs.ask("two")
    assert pairs.wanted() == [OWN, "two"]
    pairs.compare([RecomputePair("two", why="whose", asked=True, names=RUNNING[3:])])
    (answer,) = asked.result(0)
    assert answer.reason == f"whose; running are {RUNNING[3]}, {RUNNING[4]}"
    again = pairs.ask("two")
    pairs.wanted()
    pairs.compare([RecomputePair("two", why="whose", asked=True, names=[str(n) for n in range(20)])])
    assert again.result(0)[0].reason.endswith("6, 7, 12 more")
    assert [event.fields["reason"] for event in findings.told("unjudged")] == ["whose"]
