"""`Step`: in which order a step goes, what its listeners hear, and what becomes of it where something fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import (
    BatchView,
    Canary,
    CanaryConfig,
    Kind,
    MisuseError,
    Overlap,
    State,
    StepListener,
    ViolationError,
    hookimpl,
)
from canary_core.guard.reporting.read_times import IDLE_READ_S, ReadTimes
from canary_core.records import COUNTERS, POSITION, RECORDED, STATES, TOKEN, Counter

BATCH = object()
"""The engine's own, which only listeners look at."""


class Recorder(StepListener):
    """Writes down what it is called for. ``fails``: the methods that raise."""

    def __init__(self, calls: list[str], fails: tuple[str, ...] = ()) -> None:
        self.calls = calls
        self.fails = fails

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise RuntimeError(f"{name} failed")

    def begin(self, batch: object) -> None:
        assert batch is BATCH
        self._called("begin")

    def before(self, batch: object, view: BatchView | None) -> BatchView | None:
        assert batch is BATCH
        self._called("before")
        return view

    def after(self, batch: object, view: BatchView | None) -> None:
        assert batch is BATCH
        self._called("after" if view is not None else "after nothing")

    def forget(self, batch: object) -> None:
        assert batch is BATCH
        self._called("forget")

    def flushed(self) -> None:
        self._called("flushed")

    def idle(self) -> None:
        self._called("idle")

    def close(self) -> None:
        self._called("close")


class Hooks:
    """A plugin that writes down the hooks around a forward."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    @hookimpl
    def canary_attached(self, canary):
        self.calls.append("attached")

    @hookimpl
    def canary_pre_forward(self, canary, batch):
        self.calls.append("pre_forward")

    @hookimpl
    def canary_post_forward(self, canary, batch):
        self.calls.append("post_forward")

    @hookimpl
    def canary_recorded(self, canary, batch):
        self.calls.append("recorded")

    @hookimpl
    def canary_event(self, event):
        self.calls.append(event.name)


class Served:
    """A guarded toy engine with one request, one listener and all calls in order."""

    def __init__(self, *plugins: object, fails: tuple[str, ...] = (), device: str = "cpu", **settings: object) -> None:
        self.calls: list[str] = []
        self.guarded = Guarded(ToyEngine(device=device), *plugins, **settings)
        self.engine, self.canary, self.findings = self.guarded.engine, self.guarded.canary, self.guarded.findings
        self.step = self.canary.step
        self.step.add(Recorder(self.calls, fails))
        self.request = self.guarded.submit(tokens=24)

    def run(self, chunk: int = 2, view: Callable[[BatchView], BatchView | None] = lambda view: view, **options) -> str:
        """One forward by `Step.run`; ``view`` may give another view than the engine's."""
        batch = self.engine.batch(chunk=chunk)

        def forward() -> str:
            self.calls.append("forward")
            self.engine.forward(batch)
            return "output"

        def made() -> BatchView | None:
            self.calls.append("view")
            return view(batch)

        return self.step.run(forward, made, **{"batch": BATCH, **options})

    def astray(self, view: BatchView) -> BatchView:
        """The table's first entry names a slot that nobody has written."""
        self.engine.table[0, 0] = 40
        return view

    def counter(self, counter: int) -> int:
        """As the device has it now."""
        return int(self.canary.states["full"].shared.counters[counter])

    def states(self, *slots: int) -> list[int]:
        """What is known of slots, all of the region by default."""
        words = self.canary.states["full"].records[:, POSITION] % STATES
        return (words[list(slots)] if slots else words).tolist()

    def take(self) -> list[str]:
        """The calls since the last time."""
        taken = list(self.calls)
        self.calls.clear()
        return taken


STEP = ["begin", "view", "before", "forward", "after"]
"""What a listener and the engine hear of a forward."""


@pytest.fixture
def served() -> Served:
    """In log mode."""
    return Served()


@pytest.mark.parametrize("overlap", Overlap)
def test_a_step_goes_in_order(overlap):
    """Check before the forward, record after it and after whoever settles the view; the end comes last. On a CPU
    whatever may overlap."""
    calls: list[str] = []
    served = Served(Hooks(calls), stats_interval=1)
    # The first engine of a process also opens its control socket, and says where its metrics are.
    assert [call for call in calls if call not in ("control", "metrics")] == ["attached", "coverage", "attached"]
    served.calls = calls
    (listener,) = served.step.listeners
    listener.calls = calls
    calls.clear()

    def settle(view: BatchView, output: str) -> None:
        assert (view.rows, output) == (1, "output")
        calls.append("settle")

    assert served.run(overlap=overlap, settle=settle) == "output"
    assert calls == [
        "begin", "view", "before", "pre_forward", "forward", "after", "settle", "post_forward", "recorded", "stats",
    ]  # fmt: skip


def test_the_check_is_done_before_the_forward_and_the_record_after_the_settlement(served):
    """By the device's own counters."""
    seen: dict[str, tuple[int, int]] = {}

    def look(when: str) -> None:
        seen[when] = (served.counter(Counter.CHECKED_FORWARDS), served.counter(COUNTERS + RECORDED))

    class Looks(StepListener):
        def before(self, batch: object, view: BatchView | None) -> BatchView | None:
            look("before")
            return view

        def after(self, batch: object, view: BatchView | None) -> None:
            look("after")

    served.step.add(Looks())
    served.run(settle=lambda view, output: look("settle"))
    look("end")
    assert seen == {"before": (0, 0), "after": (1, 0), "settle": (1, 0), "end": (1, 2)}
    assert served.canary.stats()["recorded_slots"] == 2


def test_listeners_are_called_in_the_order_in_which_they_were_added(served):
    """Each is given what the one before it gave; those that override nothing do no harm."""

    class Other(Recorder):
        def _called(self, name: str) -> None:
            super()._called(f"other {name}")

    other = Other(served.calls)
    served.step.add(StepListener())
    served.step.add(other)
    assert served.step.listeners[-1] is other
    served.run()
    assert served.take() == [
        "begin", "other begin", "view", "before", "other before", "forward", "after", "other after",
    ]  # fmt: skip


def test_a_run_within_a_run_only_calls_its_forward(served):
    """Several forwards of the engine are one to Canary: the outer one."""
    outer = served.engine.batch(chunk=2)

    def inner() -> str:
        assert served.step.inside
        return "inner"

    def forward() -> str:
        served.engine.forward(outer)
        return served.step.run(inner, lambda: pytest.fail("asked for a view"))

    assert not served.step.inside
    assert served.step.run(forward, lambda: outer, batch=BATCH) == "inner"
    assert not served.step.inside
    assert served.step.forwards == 1
    assert served.take() == ["begin", "before", "after"]


@pytest.mark.parametrize("error", [ValueError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("mode", ["log", "raise"])
def test_a_forward_that_raises_abandons_its_step(error, mode):
    """The engine's exception passes as it is; nothing is recorded of the forward, and the next one is as any other."""
    served = Served(mode=mode)

    def forward() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        served.step.run(forward, lambda: served.engine.batch(chunk=2), batch=BATCH)
    assert raised.value is error
    assert not served.step.inside
    assert served.take() == ["begin", "before"]
    assert set(served.states()) == {State.UNWRITTEN}
    del served.request.slots[:]
    served.run()
    assert served.take() == STEP
    assert served.states(*served.request.slots) == [State.WRITTEN] * 2
    assert (served.guarded.violations, served.findings.told("misuse")) == ([], [])


def test_a_forward_without_a_view_is_forgotten(served):
    """Listeners hear that it was not checked; events that wait take effect all the same, and nothing is told."""
    served.canary.slots.alloc("full", torch.tensor([9]))
    assert served.run(view=lambda view: None) == "output"
    assert served.take() == ["begin", "view", "before", "forward", "after nothing", "forget"]
    assert served.states(9) == [State.ALLOCATED]
    assert served.counter(Counter.CHECKED_FORWARDS) == 0
    assert served.findings.told("disabled") == []


def test_an_amended_view_is_what_is_checked_and_recorded(served):
    """A listener knows more than the engine's plugin: its view goes to whoever comes next, to the check and to the
    record."""
    amended: list[BatchView] = []

    class Amends(StepListener):
        def before(self, batch: object, view: BatchView | None) -> BatchView | None:
            assert view is not None
            amended.append(replace(view, writers=view.writers * 0 + served.engine.writers.id("somebody")))
            return amended[-1]

    class Seen(StepListener):
        def before(self, batch: object, view: BatchView | None) -> BatchView | None:
            assert view is amended[-1]
            return view

        def after(self, batch: object, view: BatchView | None) -> None:
            assert view is amended[-1]

    served.step.add(Amends())
    served.step.add(Seen())
    settled: list[BatchView] = []
    served.run(settle=lambda view, output: settled.append(view))
    assert settled == amended
    served.run(view=served.astray)
    (found,) = [v for v in served.guarded.violations if v.kind is Kind.UNWRITTEN]
    assert (found.request, found.slot) == ("somebody", 40)


def test_a_listener_may_say_that_a_view_can_not_be_checked(served):
    """As if there were none."""

    class Refuses(StepListener):
        def before(self, batch: object, view: BatchView | None) -> None:
            return None

    served.step.add(Refuses())
    served.run()
    assert served.take() == ["begin", "view", "before", "forward", "after nothing", "forget"]


def test_the_halves_do_the_same(served):
    """For engines that call at two places; what is known only after the forward may be given to `after`."""
    view = served.engine.batch(chunk=2)
    served.step.before(view)
    served.engine.forward(view)
    served.step.after(replace(view, token_ids=view.token_ids + 100, expected_tokens=None))
    served.step.end()
    records = served.canary.states["full"].records[served.request.slots]
    assert records[:, TOKEN].tolist() == [105, 106]
    assert served.step.forwards == served.canary.forwards == 1
    assert served.canary.stats()["recorded_slots"] == 2
    assert served.guarded.violations == []


def after_alone(served: Served) -> None:
    """The second half without the first."""
    served.step.after()


def before_twice(served: Served) -> None:
    """The first half again."""
    view = served.engine.batch(chunk=1)
    served.step.before(view)
    served.step.before(view)
    served.step.abandon()


def forwards_without_end(served: Served) -> None:
    """More than `few_forwards` allows."""
    view = served.engine.batch(chunk=1)
    for _ in range(4):
        served.step.before(view)
        served.step.after()


MISUSE = {
    after_alone: "step.after was called without step.before",
    before_twice: "step.before was called twice",
    forwards_without_end: "3 forwards began and step.end was not called",
}


@pytest.fixture
def few_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many without an end are a misuse."""
    monkeypatch.setattr("canary_core.guard.forward.UNENDED_FORWARDS", 3)


@pytest.mark.usefixtures("few_forwards")
@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_told_once_and_what_to_do(misuse, served):
    """In log mode Canary goes on, and the next step is as any other."""
    for _ in range(3):
        misuse(served)
        served.step.end()
    (event,) = served.findings.told("misuse")
    assert event.level == "error"
    assert event.fields["reason"].startswith(MISUSE[misuse])
    assert "call " in event.fields["reason"]
    assert served.canary.enabled
    before = served.counter(COUNTERS + RECORDED)
    served.run()
    assert served.counter(COUNTERS + RECORDED) - before == 2


@pytest.mark.usefixtures("few_forwards")
@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_an_error_in_raise_mode(misuse):
    """With the same sentence."""
    served = Served(mode="raise")
    with pytest.raises(MisuseError) as raised:
        misuse(served)
    assert str(raised.value).startswith(MISUSE[misuse])


@pytest.mark.parametrize("how", ["run", "before"])
def test_what_is_no_view_points_at_the_adapter(how, served):
    """Canary is off, the engine goes on, and the sentence says what was got and who is to mend it."""
    if how == "run":
        assert served.step.run(lambda: "output", lambda: {"prefix_lens": [0]}, batch=BATCH) == "output"
    else:
        served.step.before({"prefix_lens": [0]})
        served.step.after()
        served.step.end()
    assert not served.canary.enabled
    (event,) = served.findings.told("disabled")
    assert "the adapter described what can't be" in event.fields["reason"]
    assert "must be a BatchView, got a dict; correct the adapter" in event.fields["reason"]


def test_a_view_that_can_not_be_made_points_at_the_adapter(served):
    """A view function whose `AttachError` is about the adapter's own tensors."""
    request = served.engine.batch(chunk=2)
    output = served.step.run(lambda: "output", lambda: replace(request, new_lens=[2]), batch=BATCH)
    assert output == "output"
    (event,) = served.findings.told("disabled")
    assert event.fields["where"] == "step.run(view=)"
    expected = "the adapter described what can't be, in step.run(view=): batch: new_lens must be"
    assert event.fields["reason"].startswith(expected)


def test_steps_that_end_are_no_misuse(served, few_forwards):
    """However many forwards there are, and where a failed one was abandoned."""
    for _ in range(8):
        served.run(chunk=1)
    view = served.engine.batch(chunk=1)
    served.step.before(view)
    served.step.abandon()
    served.step.before(view)
    served.step.after()
    served.step.end()
    assert served.findings.told("misuse") == []


LISTENERS = {
    "begin": lambda served: served.run(),
    "before": lambda served: served.run(),
    "after": lambda served: served.run(),
    "forget": lambda served: served.run(view=lambda view: None),
    "flushed": lambda served: served.step.flushed(),
    "idle": lambda served: served.step.idle(),
    "close": lambda served: served.step.close(),
}


@pytest.mark.parametrize("method", LISTENERS)
def test_a_listener_that_raises_switches_canary_off(method):
    """In log mode: the engine has its output, one event says where it was, and listeners are closed once."""
    served = Served(fails=(method,))
    LISTENERS[method](served)
    (event,) = served.findings.told("disabled")
    assert event.fields["where"] == f"Recorder.{method}"
    assert f"{method} failed" in event.fields["error"]
    assert not served.canary.enabled
    served.take()
    assert served.run() == "output"
    assert [call for call in served.take() if call != "close"] == ["forward"]


@pytest.mark.parametrize("method", LISTENERS)
def test_a_listener_that_raises_is_heard_in_raise_mode(method):
    """As it raised, and Canary stays on."""
    served = Served(fails=(method,), mode="raise")
    with pytest.raises(RuntimeError, match=f"{method} failed"):
        LISTENERS[method](served)
    assert served.canary.enabled
    assert not served.step.inside


@pytest.mark.parametrize("where", ["after", "settle"])
def test_what_raises_in_raise_mode_leaves_no_half_step(where):
    """Whoever goes on after it, as a test may, finds the next step as any other."""
    served = Served(mode="raise", fails=("after",) if where == "after" else ())

    def settle(view: BatchView, output: str) -> None:
        raise RuntimeError("settle failed")

    with pytest.raises(RuntimeError, match=f"{where} failed"):
        served.run(settle=settle)
    served.step.listeners[0].fails = ()
    # Nothing was recorded of that forward, so the request begins again.
    del served.request.slots[:]
    served.request.cached = 0
    served.run()
    assert served.states(*served.request.slots) == [State.WRITTEN] * 2


@pytest.mark.parametrize("where", ["step.run(view=)", "step.run(settle=)", "step.before", "step.after"])
def test_an_exception_of_ours_switches_off_and_the_forward_goes_on(where):
    """Of whoever makes the view or settles it, or of a plugin around the forward: told with its place."""

    class Bad:
        @hookimpl
        def canary_pre_forward(self, canary, batch):
            if where == "step.before":
                raise RuntimeError("no such field")

        @hookimpl
        def canary_post_forward(self, canary, batch):
            if where == "step.after":
                raise RuntimeError("no such field")

    served = Served(Bad())

    def view(made: BatchView) -> BatchView:
        if where == "step.run(view=)":
            raise RuntimeError("no such field")
        return made

    def settle(made: BatchView, output: str) -> None:
        if where == "step.run(settle=)":
            raise RuntimeError("no such field")

    assert served.run(view=view, settle=settle) == "output"
    (event,) = served.findings.told("disabled")
    assert event.fields["where"] == where
    assert "no such field" in event.fields["error"]
    assert served.take()[-1] == "close"
    assert not served.canary.enabled


def test_once_off_only_the_engine_is_called(served):
    """`run` closes listeners the first time, then calls the forward and nothing else; no other call does anything."""
    served.run()
    served.take()
    served.canary.fail("somewhere", RuntimeError("broken"))
    assert [served.run() for _ in range(3)] == ["output"] * 3
    assert served.take() == ["close", "forward", "forward", "forward"]
    told = len(served.findings.events)
    view = served.engine.batch(chunk=2)
    for call in (
        lambda: served.step.before(view), served.step.after, served.step.end, served.step.flushed, served.step.idle,
        served.step.join, served.step.follow_check, served.step.close,
    ):  # fmt: skip
        call()
    assert served.calls == []
    assert len(served.findings.events) == told
    assert served.step.forwards == 1


def test_off_mode_does_nothing_and_has_nothing():
    """No memory, no event, no call of a listener but its close, no view."""
    served = Served(mode="off")
    assert [served.run() for _ in range(2)] == ["output"] * 2
    assert served.take() == ["close", "forward", "forward"]
    view = served.engine.batch(chunk=2)
    served.step.before(view)
    served.step.after()
    served.step.end()
    served.step.flushed()
    served.step.idle()
    served.canary.close()
    assert served.calls == []
    assert served.findings.events == []
    assert served.canary.states == {}
    assert served.step.forwards == 0


def test_listeners_are_closed_once():
    """By the step or with the Canary, whichever comes first; what comes later is the engine's alone."""
    for close in ("step", "canary"):
        served = Served()
        served.run()
        served.take()
        (served.step if close == "step" else served.canary).close()
        served.canary.close()
        served.step.close()
        assert served.take() == ["close"]
        assert served.step.listeners == ()
        served.run()
        assert served.take() == ["forward"]


def test_a_flush_leaves_no_slot_with_anything(served):
    """Whatever was written, handed out or freed; listeners hear of it after."""
    served.run()
    served.canary.slots.alloc("full", torch.tensor([30, 31]))
    served.canary.slots.free("full", torch.tensor([31]))
    served.take()
    served.step.flushed()
    served.canary.slots.settle()
    assert set(served.states()) == {State.UNWRITTEN}
    assert served.take() == ["flushed"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What `idle` takes for the time: ``clock.now``."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("canary_core.guard.reporting.read_times.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_an_engine_that_polls_while_it_idles_is_read_now_and_then(served, clock):
    """Each call is told to listeners; what the device has is read at most every `IDLE_READ_S` seconds."""
    read = []
    for now in (0.0, 0.1 * IDLE_READ_S, 0.9 * IDLE_READ_S, 1.1 * IDLE_READ_S, 1.2 * IDLE_READ_S, 3 * IDLE_READ_S):
        view = served.engine.batch(chunk=1)
        served.step.before(view)
        served.engine.forward(view)
        served.step.after()
        clock.now = 100.0 + now
        served.step.idle()
        read.append(served.canary.stats()["checked_forwards"])
    assert read == [1, 1, 1, 4, 4, 6]
    assert served.take() == ["idle"] * 6


def test_an_engine_that_asks_for_each_verdict_is_read_more_rarely():
    """On a GPU, with `protect`: what is found is known before the tokens leave, without a read of the counters."""
    gpu = torch.device("cuda")
    for settings, asks, reads in (
        ({"on_violation": "protect"}, False, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"on_violation": "protect"}, True, [4, 8]),
        ({"on_violation": "protect", "read_interval": 8}, True, [8]),
        ({"on_violation": "protect", "mode": "raise"}, True, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({}, False, [4, 8]),
    ):
        times = ReadTimes(CanaryConfig(**settings), gpu)
        # A second lies between two forwards, more than any read waits for.
        assert [n for n in range(1, 9) if times.due(n, float(n), asks)] == reads, settings


def test_events_take_effect_while_the_engine_idles(served):
    """With nothing in flight nobody waits for a next forward."""
    served.canary.slots.free("full", torch.tensor([9]))
    served.canary.slots.free("full", torch.tensor([9]))
    served.step.idle()
    assert [(v.kind, v.slot) for v in served.guarded.violations] == [(Kind.DOUBLE_FREE, 9)]


def test_in_raise_mode_a_step_ends_with_its_first_finding():
    """Once; what was found and raised does not come back. An idle engine hears of it too."""
    served = Served(mode="raise")
    served.run()
    with pytest.raises(ViolationError) as raised:
        served.run(view=served.astray)
    assert (raised.value.violation.kind, raised.value.violation.slot) == (Kind.UNWRITTEN, 40)
    served.step.end()
    served.canary.slots.free("full", torch.tensor([9]))
    served.canary.slots.free("full", torch.tensor([9]))
    with pytest.raises(ViolationError, match="double_free"):
        served.step.idle()


class Late:
    """A guarded toy engine whose host reads every fourth step, as on a GPU."""

    def __init__(self) -> None:
        self.guarded = Guarded(stats_interval=3)
        # On a CPU every step is read, whatever the settings say.
        self.guarded.canary.step._reads_at._forwards = 4
        self.request = self.guarded.submit(tokens=20)

    @property
    def canary(self) -> Canary:
        return self.guarded.canary

    def step(self, fault: Callable[[], object] | None = None) -> None:
        self.guarded.step(2, fault)


def test_an_idle_engine_hears_of_the_last_forward():
    """What the last forwards found is told by the first calls without a forward, not by some forward later on."""
    late = Late()
    for _ in range(4):
        late.step()
    late.step(lambda: late.guarded.engine.table[0, 1].fill_(late.request.slots[2]))
    assert late.guarded.violations == []
    for _ in range(2):
        late.canary.step.end()
    assert {(v.kind, v.slot) for v in late.guarded.violations} >= {(Kind.POSITION, late.request.slots[2])}


def test_an_idle_engine_is_not_called_silent():
    """However long there is no forward, nothing is said: neither that checks stall, nor the same counters again."""
    late = Late()
    for _ in range(6):
        late.step()
    told = len(late.guarded.findings.events)
    for _ in range(500):
        late.canary.step.end()
    assert late.guarded.findings.events[told:] == []


@pytest.mark.gpu
@pytest.mark.parametrize(("overlap", "hooked", "first"), [
    (Overlap.NEXT, False, True), (Overlap.NEXT, True, False), (Overlap.ALL, False, True), (Overlap.ALL, True, False),
    (Overlap.CHECK, False, False), (Overlap.NONE, False, False),
])  # fmt: skip
def test_on_a_gpu_the_forward_may_come_before_its_view(overlap, hooked, first):
    """Only where the engine allows it and no plugin hooks forwards; what is checked and recorded is the same."""
    served = Served(*([Hooks([])] if hooked else []), device="cuda")
    for _ in range(3):
        served.run(overlap=overlap)
        expected = ["begin", "forward", "view", "before", "after"] if first else STEP
        assert served.take() == expected
    served.canary.drain()
    assert served.guarded.violations == []
    assert served.counter(Counter.CHECKED_FORWARDS) == 3
    assert served.counter(COUNTERS + RECORDED) == 6


SLEEP = 400_000_000
"""Cycles of a GPU, a fifth of a second: far more than the host needs for what it issues meanwhile."""


@pytest.mark.gpu
@pytest.mark.parametrize(("overlap", "event", "waits"), [
    (Overlap.NEXT, None, False), (Overlap.NEXT, "alloc", False), (Overlap.NEXT, "free", True),
    (Overlap.NEXT, "clear", True), (Overlap.NEXT, "much", True), (Overlap.ALL, None, True),
])  # fmt: skip
def test_on_a_gpu_the_next_forward_waits_for_some_records(overlap, event, waits, monkeypatch):
    """The record of a forward sleeps. The next forward is done meanwhile, unless slots were given back since: it could
    write to what the record has still to read; or the forward has written much. Nothing is found in any case, and all
    of it is recorded."""
    # The first forwards launch other kernels, see `MemoryProof`; to compile or load a kernel may wait for the device.
    monkeypatch.setattr("canary_core.runtime.memory_proof.LOOKED_FORWARDS", 2)
    served = Served(device="cuda")
    for told in ("alloc", "free", "clear", None, None):
        if told is not None:
            getattr(served.canary.slots, told)("full", torch.tensor([50], device="cuda"))
        served.run(overlap=overlap)
    free = torch.tensor([51], device="cuda")
    served.canary.drain()
    backend = served.step._recorder._backend
    slept, wrote = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def slowly(*batch: object) -> None:
        # Once, whenever the record of the next forward is issued.
        served.step._recorder._backend = backend
        torch.cuda._sleep(SLEEP)
        slept.record()
        backend.fingerprint_record(*batch)

    served.step._recorder._backend = replace(backend, fingerprint_record=slowly)
    if event == "much":
        monkeypatch.setattr("canary_core.guard.recorder.MOST_LATE_BYTES", 1)
    served.run(overlap=overlap)
    if event not in (None, "much"):
        getattr(served.canary.slots, event)("full", free)
    batch = served.engine.batch(chunk=2)

    def forward() -> None:
        served.engine.forward(batch)
        wrote.record()

    served.step.run(forward, lambda: batch, batch=BATCH, overlap=overlap)
    served.canary.drain()
    torch.cuda.synchronize()
    assert served.step._recorder._backend is backend, "no record slept: the recorder does not call what is replaced"
    assert (slept.elapsed_time(wrote) > 0) == waits
    assert served.guarded.violations == []
    assert served.counter(COUNTERS + RECORDED) == 14


def test_what_was_carried_keeps_the_fingerprints_that_came_with_it(guarded):
    """The tokens of a step whose bytes came by a copy are recorded, and their bytes stay those of the copy's source:
    what the copy left out is found, and not taken for what was written."""
    guarded.submit("a", tokens=3)
    guarded.step()
    engine, canary = guarded.engine, guarded.canary
    request = guarded.submit("b", tokens=3)
    batch = engine.batch()
    source, destination = torch.tensor([1, 2, 3]), torch.tensor(request.slots)
    for tensor in (*engine.k, engine.v[1]):
        tensor[destination] = tensor[source]
    canary.slots.copy("full", source, destination)
    tables = {name: replace(table, carried=True) for name, table in batch.tables.items()}
    canary.step.run(lambda: None, lambda: replace(batch, tables=tables))
    for r, new in zip(engine.requests, engine.news, strict=True):
        r.cached += new
    canary.slots.check("full", destination)
    canary.drain()
    assert {(v.kind, v.slot, v.source) for v in guarded.violations} == {
        (Kind.BYTES, slot, "v.0") for slot in request.slots
    }
    assert {v.stored_request for v in guarded.violations} == {"b"}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_step_has_no_highest_number(backend: str) -> None:
    """An engine that runs for months computes more than 2**31 forwards: each is recorded, and nothing found."""
    guarded = Guarded(backend=backend)
    guarded.submit("a", 3)
    guarded.step()
    guarded.canary.states["full"].shared.clock.fill_((1 << 31) - 3)
    for _ in range(6):
        guarded.decode()
    guarded.canary.drain()
    assert guarded.violations == []
    assert guarded.canary.stats()["recorded_slots"] == 3 + 6


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_smaller_forward_after_one_that_failed_is_recorded(backend: str) -> None:
    """An engine that has no memory for a batch computes it in parts: what the batch was going to write is theirs."""
    guarded = Guarded(backend=backend)
    for name in ("a", "b"):
        guarded.submit(name, 4)
    guarded.canary.step.before(guarded.engine.batch())
    guarded.canary.step.abandon()
    both = list(guarded.engine.requests)
    for request in reversed(both):
        guarded.engine.requests[:] = [request]
        guarded.step()
    guarded.engine.requests[:] = both
    guarded.decode()
    guarded.canary.drain()
    assert guarded.violations == []
    assert guarded.canary.stats()["recorded_slots"] == 4 + 4 + 2
