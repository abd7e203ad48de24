"""`Overlap.NEXT` on the host: when the record of a forward is issued, and what waits for it. A stand-in for the side
stream writes down what it is asked for, since a CPU has none. On a GPU: `test_step`, `gpu/test_side_stream`."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import Overlap, StepListener
from canary_core.records import COUNTERS, RECORDED


class Side:
    """Keeps `SideStream`'s promises on one thread; ``calls``: what happened, in order."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.open = False
        self._depth = 0
        self.inside = False
        self._postponed: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._depth += 1
        self.inside = True

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        self.inside = self._depth > 0
        self.open = True

    def mark(self) -> None:
        self.calls.append("mark")
        self.issue_postponed()

    def unmark(self) -> None:
        pass

    def reads(self, *tensors: object) -> None:
        pass

    def postpone(self, issue: Callable[[], None]) -> None:
        self._postponed.append(issue)
        self.open = True

    def issue_postponed(self) -> None:
        if self._postponed:
            self._postponed.pop()()

    def join(self, for_good: bool = False, live: bool = False) -> None:
        if not self.open or self.inside:
            return
        self.issue_postponed()
        if for_good:
            self.open = False
            self.calls.append("wait")


class Served:
    """A guarded toy engine with one request. ``calls``: forwards, records and what was asked of the side stream."""

    def __init__(self) -> None:
        self.guarded = Guarded(ToyEngine())
        self.calls: list[str] = []
        self.canary, self.engine = self.guarded.canary, self.guarded.engine
        self.step = self.canary.step
        backend = self.step._recorder._backend

        def noted(op: Callable[..., None]) -> Callable[..., None]:
            return lambda *given: (self.calls.append("record"), op(*given))[1]

        self.step._recorder._backend = replace(
            backend, record=noted(backend.record), fingerprint_record=noted(backend.fingerprint_record)
        )
        object.__setattr__(self.step._workspace, "side", Side(self.calls))
        self.guarded.submit(tokens=40)

    def run(self, overlap: Overlap = Overlap.NEXT) -> list[str]:
        """A forward of two tokens; what happened."""
        self.calls.clear()
        batch = self.engine.batch(chunk=2)

        def forward() -> None:
            self.calls.append("forward")
            self.engine.forward(batch)

        self.step.run(forward, lambda: batch, overlap=overlap)
        return list(self.calls)

    @property
    def recorded(self) -> int:
        return int(self.canary.states["full"].shared.counters[COUNTERS + RECORDED])


@pytest.fixture
def served() -> Served:
    """With one forward behind it, whose record is not issued yet."""
    served = Served()
    assert served.run() == ["mark", "forward"]
    assert served.recorded == 0
    return served


def test_the_next_forward_issues_the_record_and_does_not_wait_for_it(served):
    """The record comes before the check of that forward, which is issued after it; neither waits for more than what
    was marked."""
    for forwards in range(1, 6):
        assert served.run() == ["mark", "record", "forward"]
        assert served.recorded == 2 * forwards
    served.canary.drain()
    assert served.recorded == 12
    assert served.guarded.violations == []


def test_the_record_comes_after_the_sampler(served):
    """Whoever gives what was sampled has issued the sampler."""
    served.canary.sampled.give(torch.tensor([7]))
    assert served.recorded == 2
    assert served.run() == ["mark", "forward"]


@pytest.mark.parametrize(("event", "waits"), [
    ("alloc", False), ("share", False), ("park", False), ("free", True), ("evict", True), ("clear", True),
    ("forget", True), ("defer", True),
])  # fmt: skip
def test_it_waits_where_slots_may_be_written_again(event, waits, served):
    """Whatever gives slots back or moves bytes, also what is told later; once: the forward after that does not wait."""
    slots = served.canary.slots
    if event == "defer":
        slots.defer(lambda: slots.free("full", torch.tensor([50])))
    else:
        getattr(slots, event)("full", torch.tensor([50]))
    assert ("wait" in served.run()) == waits
    if event == "defer":
        # What was told as late as that counts for one forward more.
        assert "wait" in served.run()
    assert served.run() == ["mark", "record", "forward"]


def test_it_waits_where_much_was_written(served, monkeypatch):
    """And the record is not put off."""
    monkeypatch.setattr("canary_core.guard.recorder.MOST_LATE_BYTES", 1)
    assert served.run() == ["mark", "record", "forward", "record"]
    assert served.run() == ["wait", "mark", "forward", "record"]


def test_a_forward_of_a_lower_degree_waits(served):
    """As one that verifies drafts between those that don't."""
    assert served.run(Overlap.ALL) == ["record", "wait", "mark", "forward", "record"]
    assert served.run() == ["mark", "forward"]


def test_a_record_that_fails_switches_canary_off_and_the_engine_goes_on(served):
    """In log mode, whoever issues it."""

    def broken(*given: object) -> None:
        raise RuntimeError("broken")

    served.step._recorder._backend = replace(served.step._recorder._backend, record=broken, fingerprint_record=broken)
    served.canary.sampled.give(torch.tensor([7]))
    assert not served.canary.enabled
    assert [event.fields["where"] for event in served.guarded.findings.told("disabled")] == ["step.after"]
    assert served.run() == ["forward"]


def test_once_a_listener_has_failed_nothing_is_asked_of_the_side_stream(served):
    """It was told of the forward that comes, and has switched Canary off: the forward is the engine's alone."""

    class Bad(StepListener):
        def begin(self, batch):
            raise RuntimeError("broken")

    served.step.add(Bad())
    assert served.run() == ["wait", "forward"]
    assert served.run() == ["forward"]
