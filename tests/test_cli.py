"""The ``canary`` command, as a user runs it."""

import json
import subprocess
import sys

import pytest
from click.testing import Result
from typer.testing import CliRunner

import canary_core
from canary_core.cli import app
from canary_core.config import CanaryConfig


def run(*arguments: str, **environment: str) -> Result:
    """Runs the command in this process, on a wide terminal."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **environment})


def test_version():
    """``canary --version`` prints the version."""
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"canary {canary_core.__version__}\n")


def test_plugins_as_json(distribution):
    """``canary plugins --json`` gives one object per plugin, allowed or not, with a broken one's error."""
    distribution("canary-eye", {"canary_eye": "1/0"}, {"eye": "canary_eye"}, version="0.7")
    result = run("plugins", "--json", CANARY_PLUGINS="eye")
    found = {p["name"]: p for p in json.loads(result.output)}
    assert result.exit_code == 0
    assert found["reporting"]["allowed"]
    assert found["reporting"]["error"] is None
    eye = found["eye"]
    assert eye.pop("error").endswith("ZeroDivisionError: division by zero")
    assert eye == {
        "name": "eye", "version": "0.7", "distribution": "canary-eye", "allowed": True, "hooks": [], "engine": None,
    }  # fmt: skip


def test_plugins_show_engine_and_version(distribution):
    """The engine is shown with its installed version and whether it is supported, without importing it."""
    source = (
        "from canary_core import EngineInfo, hookimpl\n"
        "@hookimpl\ndef canary_engine():\n    return EngineInfo.of('toy-engine', '>=2')\n"
    )
    distribution("toy-engine", {}, version="1.9")
    distribution("canary-toy", {"canary_toy": source}, {"toy": "canary_toy"})
    (toy,) = (p for p in json.loads(run("plugins", "--json").output) if p["name"] == "toy")
    assert toy["engine"] == {"name": "toy-engine", "version": "1.9", "supported_range": ">=2", "supported": False}
    table = run("plugins").output
    assert "toy-engine 1.9" in table
    assert "needs >=2" in table


def test_brackets_in_an_error_survive_the_table(distribution):
    """rich's markup does not eat parts of a message."""
    distribution("canary-odd", {"canary_odd": "raise ValueError('[bold]x')"}, {"odd": "canary_odd"})
    assert "[bold]x" in run("plugins").output


def test_config_as_json_and_table():
    """``canary config`` shows every setting with default and current value."""
    found = {s["variable"]: s for s in json.loads(run("config", "--json", CANARY_MODE="raise").output)}
    assert found.keys() == {f"CANARY_{n.upper()}" for n in CanaryConfig.model_fields}
    assert (found["CANARY_MODE"]["default"], found["CANARY_MODE"]["value"]) == ("log", "raise")
    table = run("config").output
    assert all(variable in table for variable in found)


@pytest.mark.parametrize("command", ["plugins", "config"])
def test_bad_setting_is_one_sentence(command):
    """A bad setting ends the command with its sentence and exit code 2, no traceback."""
    result = run(command, CANARY_MODE="loud")
    assert result.exit_code == 2
    assert "CANARY_MODE" in result.output
    assert "Traceback" not in result.output


def test_runs_as_a_module():
    """``python -m canary_core`` is the same command."""
    done = subprocess.run(
        [sys.executable, "-m", "canary_core", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("canary ")
