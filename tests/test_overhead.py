"""What Canary says of its own cost."""

import pytest
import torch
from support.guarded import Guarded

from canary_core.guard import overhead
from canary_core.guard.overhead import EVERY, FIRST, Overhead


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of the measuring module."""
    found = Clock()
    monkeypatch.setattr(overhead, "time", found)
    return found


def steps(meter: Overhead, number: int) -> None:
    """So many steps end."""
    for _ in range(number):
        meter.step()


def test_one_forward_of_many_is_measured(clock):
    """The first after the warm-up, then one of `EVERY`; nothing is said before."""
    meter = Overhead(torch.device("cpu"))
    due = []
    for number in range(FIRST + 2 * EVERY + 4):
        if meter.due:
            due.append(number)
            meter.enter()
            clock.now += 0.001
            meter.leave()
        clock.now += 0.01
        meter.step()
    assert due == [FIRST, FIRST + EVERY + 1, FIRST + 2 * EVERY + 2]
    assert meter.stats() == {"overhead_host": pytest.approx(0.001 / 0.011)}


def test_the_forward_itself_is_left_out(clock):
    """What the engine's own function takes is no overhead, and calls within calls count once."""
    meter = Overhead(torch.device("cpu"))
    steps(meter, FIRST)

    def forward() -> str:
        clock.now += 0.5
        return "output"

    with meter:
        clock.now += 0.01
        meter.enter()
        clock.now += 0.02
        meter.leave()
        assert meter.leaving_out(forward)() == "output"
        meter.step()
    assert meter.stats() == {"overhead_host": pytest.approx(0.03 / 0.53)}


def test_an_engine_that_idles_is_not_measured(clock):
    """A step with a pause in it says nothing of what a forward costs."""
    meter = Overhead(torch.device("cpu"))
    steps(meter, FIRST)
    assert meter.due
    meter.enter()
    meter.leave()
    clock.now += 5
    meter.step()
    assert meter.stats() == {}
    assert not meter.due


@pytest.mark.parametrize("how", ["run", "before and after"])
def test_a_guarded_engine_tells_what_it_costs(how):
    """By itself, in its ``stats`` event too, however forwards are bracketed. On a CPU nearly all of a toy's step is
    Canary's."""
    guarded = Guarded(stats_interval=100)
    guarded.submit(tokens=30)
    for _ in range(100):
        if how == "run":
            view = guarded.engine.batch()
            guarded.canary.step.run(lambda view=view: guarded.engine.forward(view), lambda view=view: view)
        else:
            guarded.step()
    found = guarded.canary.overhead_stats()
    assert found.keys() == {"overhead_host"}
    assert 0 < found["overhead_host"] <= 1
    (stats,) = guarded.findings.told("stats")
    assert stats.fields["overhead_host"] == found["overhead_host"]


def test_a_forward_that_fails_leaves_nothing_open():
    """The engine's exception goes through, and the next measured forward is measured as any other."""
    guarded = Guarded()
    guarded.submit(tokens=30)
    for _ in range(FIRST):
        guarded.step()
    assert guarded.canary.step.overhead.due

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        guarded.canary.step.run(fail, guarded.engine.batch)
    guarded.step()
    assert 0 < guarded.canary.overhead_stats()["overhead_host"] <= 1


@pytest.mark.gpu
def test_device_time_is_measured_on_a_gpu():
    """Once the device is done with a measured forward, its kernels' time is known; nobody waits for it."""
    device = torch.device("cuda")
    meter = Overhead(device)
    data = torch.zeros(1 << 24, device=device)
    for _ in range(FIRST + EVERY + 2):
        with meter.device(captured=False):
            data += 1
        torch.cuda.synchronize(device)
        meter.step()
        meter.read()
    assert 0 < meter.stats()["overhead_device"] < 1
