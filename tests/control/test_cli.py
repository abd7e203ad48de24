"""``canary ctl`` and ``canary top``, as a user runs them beside a guarded process."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import canary_core
from canary_desk.cli import control_screen
from canary_desk.cli.app import app
from canary_desk.control import client

ENGINE = """
from support.guarded import Guarded
import sys
guarded = Guarded(control=sys.argv[1], read_check=-1)
request = guarded.submit(tokens=6)
guarded.step()
guarded.engine.v[1][request.slots[2], 3] += 1
guarded.decode()
print("ready", flush=True)
sys.stdin.read()
"""


def start(folder: Path, control: str = "write") -> "subprocess.Popen[str]":
    """A guarded process that has found something, with its socket in ``folder``."""
    paths = os.pathsep.join(map(str, [Path(__file__).parents[1], Path(canary_core.__file__).parents[1]]))
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, control],
        env={**os.environ, "CANARY_CONTROL_DIR": str(folder), "PYTHONPATH": paths},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def ready(process: "subprocess.Popen[str]") -> None:
    """Waits until it can be asked."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A guarded process; gives its pid and the folder of its socket."""
    folder = tmp_path_factory.mktemp("c")
    folder.chmod(0o700)
    process = start(folder)
    ready(process)
    yield process.pid, folder
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three guarded processes, the second of which is stopped; gives their pids and the folder of their sockets."""
    folder = tmp_path_factory.mktemp("c")
    folder.chmod(0o700)
    processes = [start(folder) for _ in range(3)]
    for process in processes:
        ready(process)
    processes[1].send_signal(signal.SIGSTOP)
    yield [process.pid for process in processes], folder
    processes[1].send_signal(signal.SIGCONT)
    for process in processes:
        process.communicate(timeout=60)


def canary(engine, *arguments: str):
    """The command, where the engine's socket is."""
    environment = {"COLUMNS": "80", "CANARY_CONTROL_DIR": str(engine[1])}
    return CliRunner().invoke(app, list(arguments), env=environment)


@pytest.mark.parametrize("arguments", [["ctl", "status"], ["top", "--times", "2", "--every", "0.1"]])
def test_what_is_shown_fits_80_columns(arguments, engine):
    """What is guarded, what was found, how far the scrub is."""
    result = canary(engine, *arguments)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    for part in (f"process {engine[0]}", "read and write", "64 slots", "100.00%", "1 incident:", "bytes in full 1"):
        assert part in result.stdout


def test_json_for_programs(engine):
    """``ctl`` prints a list of all processes, ``top`` one object a line."""
    (status,) = json.loads(canary(engine, "ctl", "status", "--json", "--pid", str(engine[0])).stdout)
    assert (status["pid"], status["canaries"][0]["findings"]) == (engine[0], {"bytes in full": 1})
    lines = canary(engine, "top", "--json", "--times", "2", "--every", "0.1").stdout.splitlines()
    assert [json.loads(line)["pid"] for line in lines] == [engine[0]] * 2
    (dump,) = json.loads(canary(engine, "ctl", "dump").stdout)
    assert {"versions", "settings", "coverage", "events"} <= dump.keys()


def test_pause_and_resume(engine):
    """Each says how many pools it reached, and ``status`` shows it."""
    assert canary(engine, "ctl", "pause").stdout == f"process {engine[0]}: pause, 1 pool\n"
    assert "paused" in canary(engine, "ctl", "status").stdout
    assert canary(engine, "ctl", "resume").stdout == f"process {engine[0]}: resume, 1 pool\n"
    assert canary(engine, "ctl", "budget", "1%").stdout == f"process {engine[0]}: budget 1%, 1 pool\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ctl", "mode", "loud"], "canary: mode must be log or raise, got 'loud'"),
        (["ctl", "budget", "101%"], "canary: CANARY_SCRUB_BUDGET must be at most 100%"),
        (["ctl", "status", "--pid", "1"], "canary: process 1 listens in"),
        (["top", "--pid", "1"], "canary: process 1 listens in"),
    ],
)
def test_a_refusal_is_one_sentence(arguments, sentence, engine):
    """On stderr, with exit code 2."""
    result = canary(engine, *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(sentence)


@pytest.mark.parametrize("arguments", [["ctl", "status"], ["top", "--times", "1"]])
def test_one_that_does_not_answer_hides_nobody(arguments, three):
    """The others are shown, then a sentence says which one is stopped; it takes no longer than the patience for one."""
    pids, folder = three
    began = time.monotonic()
    result = canary((None, folder), *arguments)
    assert time.monotonic() - began < 2 * client.ANSWER_S
    for pid in (pids[0], pids[2]):
        assert f"process {pid}" in result.stdout
    said = " ".join((result.stdout + result.stderr).replace("\n", " ").split())
    assert f"process {pids[1]} did not answer within 2 s" in said
    assert f"it is stopped; kill -CONT {pids[1]} lets it go on" in said
    assert result.exit_code == (2 if arguments[0] == "ctl" else 0)


@pytest.mark.parametrize("arguments", [["ctl", "dump"], ["ctl", "status", "--json"], ["top", "--times", "1", "--json"]])
def test_programs_get_an_object_for_each_engine(arguments, three):
    """With ``error`` where one gave no answer."""
    pids, folder = three
    out = canary((None, folder), *arguments).stdout
    answers = json.loads(out) if arguments[0] == "ctl" else list(map(json.loads, out.splitlines()))
    assert {Path(a["socket"]).stem: "error" in a for a in answers} == {
        str(pids[0]): False, str(pids[1]): True, str(pids[2]): False,
    }  # fmt: skip


def test_one_that_is_stopped_for_long_is_still_told_of(three):
    """Also once its queue of connections is full: it is not taken for one that has ended."""
    pids, folder = three
    with contextlib.ExitStack() as waiting:
        with contextlib.suppress(BlockingIOError):
            while True:
                one = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                one.setblocking(False)
                one.connect(str(folder / f"{pids[1]}.sock"))
        result = canary((None, folder), "ctl", "status")
    assert result.exit_code == 2
    assert f"process {pids[0]}" in result.stdout
    assert f"process {pids[1]} did not answer" in result.stderr


def test_a_change_reaches_those_that_answer(three):
    """And the sentence about the other says that it may still be done."""
    pids, folder = three
    result = canary((None, folder), "ctl", "budget", "1%")
    done = {f"process {pid}: budget 1%, 1 pool" for pid in (pids[0], pids[2])}
    assert set(result.stdout.splitlines()) == done
    assert result.exit_code == 2
    assert f"Once it goes on, it may do it: see canary ctl status --pid {pids[1]}." in result.stderr


def test_status_tells_of_tokens_and_of_the_alarm():
    """As the engine's own figure says, and the last probe; a process of another release has neither."""
    pool = {
        "model": "", "served_model": "llama", "replica": 1, "rank": 2, "state": "on", "mode": "log", "device": "cpu",
        "regions": {}, "coverage_ratio": 1.0, "memory_bytes": 0, "forwards": 3, "last_check_age_s": 1.0, "budget": "1%",
        "findings": {}, "incidents": 0, "detection_s": None,
    }  # fmt: skip
    answer = {"pid": 1, "program": "x", "uptime_s": 1.0, "writable": False, "canaries": [pool]}

    def shown(**more: object) -> str:
        console = Console(width=80, file=io.StringIO())
        control_screen.show(console, [{**answer, "host": "n7", "canaries": [{**pool, **more}]}])
        return " ".join(console.file.getvalue().replace("│", " ").split())

    well = shown(computed_tokens=200, guarded_ratio=1.0, alarm_tests=3, alarm_dead=0, last_alarm_test_age_s=4.0)
    for part in ("on n7", "replica 1, rank 2", "model llama", "200 computed, 100.00% guarded", "tested 4.0 s ago"):
        assert part in well
    bad = shown(computed_tokens=200, guarded_ratio=0.5, alarm_tests=3, alarm_dead=1, last_alarm_test_age_s=4.0)
    assert "50.00% guarded" in bad
    assert "DEAD" in bad
    for name in ("served_model", "replica"):
        del pool[name]
    assert "tokens" not in shown()
