"""What `Canary.warm_up` puts off while another process compiles, and when it is done."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.guarded import Guarded

from canary_core import AttachError, BatchView, Event, Overlap, SlotTable
from canary_core.guard import start_up
from canary_core.ops.backends import torch_backend


class Compiling:
    """Stands for a `CompileProcess`, and notes what is done with it."""

    keys = frozenset({"check"})

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seconds = 7.0
        self.code = 0

    def wait(self) -> None:
        self.calls.append("wait")

    def end(self) -> None:
        self.calls.append("end")

    def remember(self) -> None:
        self.calls.append("remember")

    @contextmanager
    def same_cache(self) -> Iterator[None]:
        self.calls.append("cache")
        yield


class Starting:
    """A toy engine that starts under guard, with a back end that compiles in ``processes``: one for each call of
    `Canary.warm_up`, and none once the list is empty."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processes: int = 1, **settings: object) -> None:
        self.processes = [Compiling() for _ in range(processes)]
        left = list(self.processes)
        self.running: list[int] = []
        """How many ran when the next one was asked for."""
        self.compiled = 0
        """How often this process was to compile."""

        def beside(launches: Callable[[], None], running: list[Compiling]) -> Compiling | None:
            self.running.append(len(running))
            return left.pop(0) if left else None

        def together(launches: Callable[[], None]) -> None:
            self.compiled += 1

        backend = replace(torch_backend(), row_steps=(16,), compile_together=together, compile_beside=beside)
        monkeypatch.setattr("canary_core.ops.backends.torch_backend", lambda: backend)
        monkeypatch.setattr("canary_core.guard.warm_up._compiles", lambda states: True)
        self.guarded = Guarded(warms_up=True, backend="torch", **settings)
        self.canary = self.guarded.canary

    @property
    def process(self) -> Compiling:
        """The first one."""
        return self.processes[0]

    def padding(self, rows: int) -> Iterator[BatchView]:
        none = torch.zeros(rows, dtype=torch.int32)
        table = SlotTable(self.guarded.engine.table, write_slots=none.long())
        yield BatchView(none, none, none, none, {"full": table})

    def warm_up(self, beside: bool = True) -> None:
        self.canary.warm_up(self.padding, most_rows=4, beside=beside)

    @property
    def told(self) -> list[Event]:
        return self.guarded.findings.told("warmed_up")

    @property
    def fingerprinted(self) -> bool:
        return bool(self.canary.states["full"].fingerprints.any())


FINISHED = ["wait", "cache", "remember", "end"]


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Starting:
    """An engine whose warm-up was put off."""
    made = Starting(monkeypatch)
    made.warm_up()
    return made


def run(starting: Starting) -> None:
    """A forward."""
    starting.guarded.submit()
    starting.guarded.step()


def before(starting: Starting) -> None:
    """A forward of an engine that calls at two places."""
    engine = starting.guarded.engine
    engine.submit("a", [5, 6, 7])
    starting.canary.step.before(engine.batch(chunk=8))


def issues_first(starting: Starting) -> None:
    """A forward of one that asks whether to issue it first."""
    starting.canary.step.issues_first(Overlap.ALL)


def event(starting: Starting) -> None:
    """Slots are handed out."""
    starting.canary.slots.alloc("full", torch.tensor([3]))


def arrival(starting: Starting) -> None:
    """Bytes arrive from elsewhere."""
    starting.canary.slots.forget("full", torch.tensor([3]))


def flush(starting: Starting) -> None:
    """The engine empties its caches."""
    starting.canary.step.flushed()


def asked(starting: Starting) -> None:
    """The plugin knows that the engine has started."""
    starting.canary.finish_warm_up()


@pytest.mark.parametrize("first", [run, before, issues_first, event, arrival, flush, asked])
def test_what_was_put_off_is_done_before_anything_else(starting, first):
    """Whichever comes first waits for the process, and then all is as after a warm-up that put nothing off."""
    assert (starting.process.calls, starting.fingerprinted, starting.compiled) == ([], False, 0)
    assert starting.told == []
    first(starting)
    assert starting.process.calls == FINISHED
    assert starting.fingerprinted
    assert starting.compiled == 1
    (told,) = starting.told
    assert (told.fields["batches"], told.fields["beside_s"]) == (2, 7.0)
    assert told.fields["seconds"] < 7
    assert "reason" not in told.fields
    assert starting.guarded.violations == []


def test_it_is_done_once(starting):
    """Forwards after the first one wait for nothing."""
    run(starting)
    run(starting)
    starting.canary.finish_warm_up()
    assert starting.process.calls == FINISHED
    assert len(starting.told) == 1


def test_threads_that_come_meanwhile_wait_for_it(starting):
    """None of them launches before all is ready."""
    entered, go_on = threading.Event(), threading.Event()
    order = []

    def wait() -> None:
        entered.set()
        go_on.wait(10)
        order.append("ready")

    starting.process.wait = wait
    first = threading.Thread(target=starting.canary.finish_warm_up)
    second = threading.Thread(target=lambda: (event(starting), order.append("event")))
    first.start()
    entered.wait(10)
    second.start()
    go_on.set()
    first.join(10)
    second.join(10)
    assert order == ["ready", "event"]
    assert len(starting.told) == 1


def test_a_long_start_says_what_it_is_at(starting, monkeypatch):
    """Again and again, until it is done; a short one says nothing."""
    monkeypatch.setattr(start_up, "PROGRESS_S", 0.01)
    told = starting.guarded.findings.told

    def wait() -> None:
        deadline = time.monotonic() + 60
        while len(told("starting")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    starting.process.wait = wait
    run(starting)
    assert {(e.fields["doing"], e.fields["batches"]) for e in told("starting")[:3]} == {("another process compiles", 2)}
    (done,) = told("warmed_up")
    assert done.fields["batches"] == 2
    time.sleep(0.1)  # one may be on its way
    number = len(told("starting"))
    time.sleep(0.1)
    assert len(told("starting")) == number


def test_what_a_process_leaves_is_compiled_here_and_told(starting):
    """It may have found no compiler, or have been killed."""
    starting.process.code = 1
    run(starting)
    (told,) = starting.told
    assert "ended with 1" in told.fields["reason"]
    assert starting.compiled == 1
    assert starting.canary.enabled


def test_with_a_full_cache_nothing_is_put_off(monkeypatch):
    """No process is started then."""
    starting = Starting(monkeypatch, processes=0)
    starting.warm_up()
    assert starting.fingerprinted
    (told,) = starting.told
    assert "beside_s" not in told.fields


def test_without_beside_the_process_is_waited_for(monkeypatch):
    """Engines that ask for their first forward at once get all of it at once."""
    starting = Starting(monkeypatch)
    starting.warm_up(beside=False)
    assert starting.process.calls == FINISHED
    assert starting.fingerprinted
    assert len(starting.told) == 1


def test_two_warm_ups_are_finished_together(monkeypatch):
    """SGLang has a second one for a draft model's batches; its process is told what the first one compiles."""
    starting = Starting(monkeypatch, processes=2)
    starting.warm_up()
    starting.warm_up()
    assert starting.running == [0, 1]
    run(starting)
    assert [process.calls.count("wait") for process in starting.processes] == [1, 1]
    (told,) = starting.told
    assert told.fields["batches"] == 4


def test_a_second_warm_up_that_puts_nothing_off_finishes_the_first(starting):
    """And both are told as one."""
    starting.warm_up(beside=False)
    assert starting.process.calls == FINISHED
    (told,) = starting.told
    assert told.fields["batches"] == 4


@pytest.mark.parametrize("end", ["close", "_at_exit"])
def test_an_engine_that_ends_early_waits_for_nothing(starting, end):
    """The process is ended, and the summary is told."""
    getattr(starting.canary, end)()
    assert starting.process.calls == ["end"]
    assert len(starting.guarded.findings.told("summary")) == 1
    assert starting.told == []


def test_a_drain_waits_for_nothing_and_ends_nothing(starting):
    """The engine may go on."""
    starting.canary.drain()
    assert starting.process.calls == []
    run(starting)
    assert starting.process.calls == FINISHED


def test_nothing_is_finished_for_a_canary_that_was_switched_off(starting):
    """An error of ours came first."""
    starting.canary.fail("somewhere", ValueError("no"))
    run(starting)
    assert starting.process.calls == ["end"]
    assert starting.told == []


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_what_was_put_off_is_never_captured(monkeypatch, mode):
    """In log mode Canary switches itself off and the engine goes on; nothing was launched or loaded."""
    starting = Starting(monkeypatch, mode=mode)
    starting.warm_up()
    monkeypatch.setattr("canary_core.guard.start_up.capturing", lambda device: True)
    if mode == "raise":
        with pytest.raises(AttachError, match="finish_warm_up"):
            before(starting)
    else:
        before(starting)
        (told,) = starting.guarded.findings.told("disabled")
        assert "finish_warm_up" in told.fields["reason"]
        assert not starting.canary.enabled
    assert starting.process.calls == ["end"]
    assert starting.compiled == 0


def test_an_error_while_finishing_goes_where_all_go(starting):
    """Canary is off, and the forward runs."""
    starting.process.wait = lambda: 1 / 0
    run(starting)
    assert not starting.canary.enabled
    assert starting.process.calls == ["end"]
    assert len(starting.guarded.findings.told("disabled")) == 1


def test_where_canary_is_off_there_is_nothing_to_finish():
    """`Canary.finish_warm_up` may always be called."""
    guarded = Guarded(mode="off")
    guarded.canary.warm_up(lambda rows: pytest.fail("asked for batches"), most_rows=4, beside=True)
    guarded.canary.finish_warm_up()
