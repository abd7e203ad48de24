"""`CompileProcess` and what it runs: it never holds the engine up for good, and never outlives it."""

import signal
import subprocess
import sys
import threading

import pytest

from canary_core.ops import compile_process
from canary_core.ops.compile_process import CACHE_VARIABLE, CompileProcess
from canary_core.ops.kernels import compile_child


@pytest.fixture
def started(monkeypatch):
    """Starts processes that run a line of Python in the place of what compiles, and ends them."""
    made = []

    def start(line, work=b"", folder=None):
        popen = subprocess.Popen
        monkeypatch.setattr(
            compile_process.subprocess,
            "Popen",
            lambda command, **options: popen([sys.executable, "-c", line, *command[4:]], **options),
        )
        made.append(CompileProcess(work, frozenset(), folder, lambda: None))
        return made[-1]

    yield start
    for process in made:
        process.end()


def test_it_gets_its_work_and_is_waited_for(started):
    """However much that is: the engine goes on before all of it was taken."""
    process = started("import sys; sys.exit(len(sys.stdin.buffer.read()) == 1 << 20)", bytes(1 << 20))
    process.wait()
    assert process.code == 1
    assert process.seconds > 0


def test_one_that_ends_without_its_work_is_no_error(started):
    """What it left is compiled by whoever launches it."""
    process = started("import sys; sys.exit(3)", bytes(1 << 20))
    process.wait()
    assert process.code == 3


def test_one_that_hangs_is_ended(started, monkeypatch):
    """After a while the engine compiles by itself."""
    monkeypatch.setattr(compile_process, "MOST_WAIT_S", 0.1)
    process = started("import time; time.sleep(600)")
    process.wait()
    assert process.code == -9


@pytest.mark.parametrize(
    ("line", "done"),
    [("import sys; sys.stdout.write('of Triton\\n' + 'all is compiled')", True), ("import os; os.abort()", False)],
)
def test_only_what_says_so_is_done(started, line, done):
    """Where SIGCHLD is ignored the system forgets a child's exit status, and Python takes it for a good one."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = started(line)
        process.wait()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (process.code == 0) is done


@pytest.fixture
def probe(monkeypatch, tmp_path):
    """Runs a module in the place of what compiles, in a working directory with foreign modules of its own."""
    modules, here = tmp_path / "modules", tmp_path / "here"
    modules.mkdir()
    here.mkdir()
    for name in ("fcntl", "queue", "json", "runpy", "triton", "canary_core", "probe"):
        (here / f"{name}.py").write_text("import os; os._exit(66)")
    (modules / "probe.py").write_text(
        "import fcntl, queue, sys, os, canary_core\n"
        "from canary_core.ops.compile_process import DONE\n"
        "assert os.path.realpath(os.getcwd()) not in map(os.path.realpath, sys.path), sys.path\n"
        "sys.stdout.buffer.write(DONE)\n"
    )
    monkeypatch.chdir(here)
    monkeypatch.setattr(compile_process, "MODULE", "probe")
    return modules, here


@pytest.mark.parametrize("first", ["", ".", "{here}", "{here}/../here"])
def test_nothing_of_the_working_directory_is_run(probe, monkeypatch, first):
    """Anybody may be able to write there, and an innocent module may be called like one of Python's. Wherever else this
    process finds modules, so does that one."""
    modules, here = probe
    monkeypatch.setattr(sys, "path", [first.format(here=here), *sys.path, str(modules)])
    monkeypatch.setenv("PYTHONPATH", "")
    process = CompileProcess(b"", frozenset(), None, lambda: None)
    process.wait()
    assert process.code == 0


def test_a_working_directory_that_was_removed_stops_nobody(probe, monkeypatch):
    """Folders that are given whole are still found."""
    modules, here = probe
    monkeypatch.setattr(sys, "path", ["", "relative", *sys.path, str(modules)])
    monkeypatch.setattr(compile_process.os, "getcwd", lambda: (_ for _ in ()).throw(FileNotFoundError(str(here))))
    process = CompileProcess(b"", frozenset(), None, lambda: None)
    process.wait()
    assert process.code == 0


@pytest.mark.parametrize(
    ("executable", "frozen"),
    [("/opt/app/serve", True), ("/usr/bin/python3", True), ("/usr/sbin/uwsgi", False), ("", False)],
)
def test_an_application_is_not_started_a_second_time(monkeypatch, executable, frozen):
    """A frozen one, or one that embeds Python, is what `sys.executable` names there."""
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(compile_process.subprocess, "Popen", lambda *given, **named: pytest.fail("started"))
    with pytest.raises(OSError, match="no Python interpreter"):
        CompileProcess(b"", frozenset(), None, lambda: None)


def test_nothing_of_canary_starts_there(started, monkeypatch):
    """Neither plugins nor a guard. Triton's cache is this process's."""
    monkeypatch.setenv("CANARY_PLUGINS", "sglang")
    monkeypatch.setenv("CANARY_MODE", "raise")
    line = (
        "import os; e = os.environ; "
        f"raise SystemExit((e.get('CANARY_PLUGINS'), e['CANARY_MODE'], e['{CACHE_VARIABLE}']) "
        f"== (None, 'off', 'somewhere'))"
    )
    process = started(line, folder="somewhere")
    process.wait()
    assert process.code == 1


@pytest.mark.parametrize("before", [None, "elsewhere", "somewhere"])
def test_triton_looks_where_it_has_compiled(started, monkeypatch, before):
    """As long as this process loads that; then it looks where it did."""
    if before is None:
        monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(CACHE_VARIABLE, before)
    process = started("", folder="somewhere")
    with process.same_cache():
        assert compile_process.os.environ[CACHE_VARIABLE] == "somewhere"
    assert compile_process.os.environ.get(CACHE_VARIABLE) == before


def test_it_ends_with_its_engine(monkeypatch):
    """Also where that was killed."""
    parents = [7, 7, 1]
    monkeypatch.setattr(compile_child, "LOOK_S", 0.0)
    monkeypatch.setattr(compile_child.os, "getppid", lambda: parents.pop(0))

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(compile_child.os, "_exit", leave)
    with pytest.raises(SystemExit):
        compile_child._end_with(7)
    assert parents == []


def test_ranks_of_one_machine_compile_one_after_the_other(tmp_path):
    """The second one finds what the first has compiled."""
    order = []
    entered = threading.Event()

    def second():
        entered.set()
        with compile_child._alone(tmp_path):
            order.append("second")

    with compile_child._alone(tmp_path):
        other = threading.Thread(target=second)
        other.start()
        entered.wait(10)
        other.join(0.2)
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]
