"""What `Canary.warm_up` puts off while another process compiles, and when it is done; and what an engine that serves
has compiled beside it."""

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


class Running(Compiling):
    """One that still runs, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def wait(self) -> None:
        self.ended.wait(60)
        super().wait()

    def runs(self) -> bool:
        return not self.ended.is_set()

    def let_go(self) -> None:
        """It has ended, and its end was told."""
        self.ended.set()
        deadline = time.monotonic() + 60
        while any(thread.name == "canary alone" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Serving:
    """A toy engine that serves already, and compiles beside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[Running] = []
        """The processes."""
        self.error: OSError | None = None
        """In the place of another process."""
        self.ops: list[str] = []
        """What the forwards launched of two ops."""
        backend = torch_backend()

        def beside(launches: Callable[[], None], running: object) -> Running:
            if self.error is not None:
                raise self.error
            self.begun.append(Running())
            return self.begun[-1]

        def noted(name: str) -> Callable[..., None]:
            op = getattr(backend, name)
            return lambda *given: (self.ops.append(name), op(*given))[1]

        ops = {name: noted(name) for name in ("record", "fingerprint_record")}
        backend = replace(backend, row_steps=(16,), compile_beside=beside, **ops)
        monkeypatch.setattr("canary_core.ops.backends.torch_backend", lambda: backend)
        monkeypatch.setattr("canary_core.guard.warm_up._compiles", lambda states: True)
        monkeypatch.setattr(start_up, "ALONE", start_up.Alone())
        self.guarded = self.engine()

    def engine(self, **settings: object) -> Guarded:
        """Another one."""
        return Guarded(backend="torch", **settings)

    def compile(self, guarded: Guarded, rows: int = 2, expected: bool = False) -> None:
        """As `Canary.warm_up` is called while it serves."""

        def padding(rows: int) -> list[BatchView]:
            none = torch.zeros(rows, dtype=torch.int32)
            own = none[:, None] if expected else None
            tables = {"full": SlotTable(guarded.engine.table)}
            return [BatchView(none, none, none, none, tables, expected_tokens=own)]

        guarded.canary.warm_up(padding, rows, alone=True)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    """One that has begun to compile after a forward."""
    made = Serving(monkeypatch)
    made.guarded.submit()
    made.guarded.step()
    made.compile(made.guarded)
    return made


def test_an_engine_that_serves_waits_for_no_compiler(serving):
    """It goes on by the ops that it has, until the process has compiled the one for both; then that is told."""
    (process,) = serving.begun
    for _ in range(20):
        serving.guarded.step()
    assert serving.ops == ["record"] * 21
    assert process.calls == []
    assert serving.guarded.findings.told("warmed_up") == []
    process.let_go()
    serving.guarded.step()
    assert serving.ops[21:] == ["fingerprint_record"]
    (told,) = serving.guarded.findings.told("warmed_up")
    assert (told.fields["beside_s"], told.fields["batches"], told.fields["backend"]) == (7.0, 1, "torch")
    assert "reason" not in told.fields
    assert process.calls == ["wait", "remember"]
    assert serving.guarded.violations == []


def test_each_sort_is_compiled_once_and_one_at_a_time(serving):
    """In the life of the engine's process, whose caches come and go."""
    others = [serving.engine(), serving.engine()]
    serving.compile(others[0], rows=40)
    assert len(serving.begun) == 1
    assert others[0].canary.states["full"].launches.compiling()
    serving.begun[0].let_go()
    assert not others[0].canary.states["full"].launches.compiling()
    for rows, expected in ((2, False), (40, False), (2, True)):
        serving.compile(others[0], rows, expected)
        serving.compile(others[1], rows, expected)
        serving.begun[-1].let_go()
    assert len(serving.begun) == 3


def test_the_process_outlives_its_canary(serving):
    """The next cache of `generate()` needs the same."""
    (process,) = serving.begun
    serving.guarded.canary.close()
    serving.guarded.canary.release()
    assert process.calls == []
    process.let_go()
    assert process.calls == ["wait", "remember"]
    assert len(serving.guarded.findings.told("warmed_up")) == 1


@pytest.mark.parametrize("code", [0, 1])
def test_what_such_a_process_leaves_is_told(serving, code):
    """It is compiled when it is first launched, and not remembered as compiled."""
    (process,) = serving.begun
    process.code = code
    process.let_go()
    (told,) = serving.guarded.findings.told("warmed_up")
    assert ("ended with 1" in str(told.fields.get("reason"))) is bool(code)
    assert process.calls == ["wait", "remember"][: 2 - code]


def test_an_engine_where_no_process_can_start_serves_on(monkeypatch):
    """Which is told once, with the reason."""
    serving = Serving(monkeypatch)
    serving.error = OSError("sys.executable is '/opt/app', which is no Python interpreter")
    for _ in range(2):
        serving.compile(serving.guarded)
    serving.guarded.submit()
    serving.guarded.step()
    (told,) = serving.guarded.findings.told("warmed_up")
    assert "/opt/app" in told.fields["reason"]
    assert "when they are first launched" in told.fields["reason"]
    assert serving.guarded.canary.enabled


def test_within_a_capture_nothing_is_compiled_beside(monkeypatch):
    """Nor is that a fault."""
    serving = Serving(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("canary_core.guard.start_up.capturing", lambda device: True)
        serving.compile(serving.guarded)
    assert serving.begun == []
    assert serving.guarded.canary.enabled


def test_a_start_without_another_process_says_so(monkeypatch):
    """All is compiled here, and the reason is in the event."""
    starting = Starting(monkeypatch, processes=0)

    def beside(launches: object, running: object) -> None:
        raise OSError("no more processes")

    workspace = starting.canary._workspace
    backend = replace(workspace.backend, compile_beside=beside)
    monkeypatch.setattr(starting.canary, "_workspace", replace(workspace, backend=backend))
    starting.warm_up()
    (told,) = starting.told
    assert "no more processes" in told.fields["reason"]
    assert starting.compiled == 1
