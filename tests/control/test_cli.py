"""``canary ctl`` and ``canary top``, as a user runs them beside a guarded process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import canary_core
from canary_core.cli.app import app

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


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A guarded process that has found something; gives its pid and the folder of its socket."""
    folder = tmp_path_factory.mktemp("c")
    folder.chmod(0o700)
    paths = os.pathsep.join(map(str, [Path(__file__).parents[1], Path(canary_core.__file__).parents[1]]))
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, "write"],
        env={**os.environ, "CANARY_CONTROL_DIR": str(folder), "PYTHONPATH": paths},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process.pid, folder
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
