"""The commands of docs/runbook.md, as they stand there, beside a guarded process."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import canary_core
from canary_desk.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
COMMANDS = sorted(set(re.findall(r"`canary ([a-z][^`]*)`", PAGE)))
CHANGES = [command for command in COMMANDS if re.match(r"ctl (mode|budget|pause|resume)", command)]

ENGINE = """
from support.guarded import Guarded
import sys
guarded = Guarded(read_check=-1)
request = guarded.submit(tokens=6)
guarded.step()
guarded.engine.v[1][request.slots[2], 3] += 1
guarded.decode()
print("ready", flush=True)
sys.stdin.read()
"""


class Engine:
    """A guarded process that has found something, with all that its operator looks at in ``folder``."""

    def __init__(self, folder: Path, control: str) -> None:
        folder.chmod(0o700)
        paths = os.pathsep.join(map(str, [Path(__file__).parents[1], Path(canary_core.__file__).parents[1]]))
        self.log = folder / "engine.log"
        self.bundles = folder / "incidents"
        self.bundles.mkdir()
        self.settings = {"CANARY_CONTROL_DIR": str(folder), "CANARY_CONTROL": control}
        environment = {
            **os.environ, **self.settings, "PYTHONPATH": paths, "CANARY_INCIDENT_DIR": str(self.bundles),
            "CANARY_LOG_FORMAT": "json",
        }  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ENGINE],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", self.log.read_text()

    def operator(self, command: str):
        """Runs a command of the page: only what stands for a path is filled in, and what runs for ever ends."""
        arguments = shlex.split(command)
        if "DIR" in arguments:
            arguments[arguments.index("DIR")] = str(self.bundle())
        if "LOG" in arguments:
            arguments[arguments.index("LOG")] = str(self.log)
        if arguments == ["top"]:
            arguments += ["--times", "1"]
        return CliRunner().invoke(app, arguments, env={"COLUMNS": "80", **self.settings})

    def bundle(self) -> Path:
        """The incident's, once it is written."""
        deadline = time.monotonic() + 60
        while not (found := sorted(self.bundles.glob("*/manifest.json"))) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found[0].parent


@pytest.fixture(scope="module", params=["read", "write"])
def engine(request, tmp_path_factory):
    """Started with the default of CANARY_CONTROL, and with the one that lets it be changed."""
    made = Engine(tmp_path_factory.mktemp("r"), request.param)
    yield made
    made.process.communicate(timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_what_the_page_says(command, engine):
    """It works as it stands there; one that changes something is refused by default, with the setting that it needs."""
    result = engine.operator(command)
    if command in CHANGES and engine.settings["CANARY_CONTROL"] == "read":
        assert result.exit_code == 2
        assert "start the engine with CANARY_CONTROL=write" in result.stderr
    else:
        assert result.exit_code == 0, result.output
        assert result.stdout.strip()


def test_what_needs_a_setting_says_so():
    """Each "Do" with a command that changes something names CANARY_CONTROL=write, and so does the page's beginning."""
    assert CHANGES
    advice = [part for part in PAGE.split("\n\n") if part.startswith("**Do.**")]
    needs = [part for part in advice if any(f"`canary {command}`" in part for command in CHANGES)]
    assert len(needs) >= 3
    assert [part for part in needs if "`CANARY_CONTROL=write`" not in part] == []
    assert "CANARY_CONTROL=write" in PAGE.partition("\n## ")[0]
