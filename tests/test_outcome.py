"""``canary run`` in CI: an exit code of its own for incidents, a JUnit file, annotations, and known ones left out."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import canary_core

ROOT = Path(__file__).parents[1]
SERVE = """
import sys
from support.toy import ToyEngine
from canary_core import Canary, CanaryConfig, ViolationError
engine = ToyEngine(layers=3)
canary = Canary(engine.regions(), CanaryConfig.load(), writers=engine.writers)
engine.submit("<a>", list(range(100, 112)))
engine.step(canary)
if "break" in sys.argv:
    engine.k[1].view(__import__("torch").int32)[engine.requests[0].slots[5], 3] ^= 1 << 9
try:
    engine.step(canary, 4)
except ViolationError:
    print("stopped")
sys.exit(3 if "fail" in sys.argv else 0)
"""


def run(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """``canary run`` of a program with an engine, in a process of its own."""
    folder.joinpath("serve.py").write_text(SERVE)
    paths = os.pathsep.join(map(str, (Path(canary_core.__file__).parents[1], ROOT / "tests")))
    env = {**os.environ, "PYTHONPATH": paths, "CANARY_READ_CHECK": "-1", "CANARY_BACKEND": "torch", **environment}
    options = [a for a in arguments if a.startswith("--")]
    rest = [a for a in arguments if not a.startswith("--")]
    command = [sys.executable, "-m", "canary_core", "run", *options, "serve.py", *rest]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=folder)


@pytest.fixture
def plugin(tmp_path):
    """The environment of a plugin that hooks nothing: raise mode wants one."""
    info = tmp_path / "canary_toy-1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: canary-toy\nVersion: 1\n")
    info.joinpath("entry_points.txt").write_text("[canary]\ntoy = canary_sample\n")
    tmp_path.joinpath("canary_sample.py").write_text(
        "from canary_core import hookimpl\n@hookimpl\ndef canary_install(config):\n    pass\n"
    )
    return {"CANARY_PLUGINS": "toy"}


@pytest.mark.parametrize(
    ("words", "environment", "code"),
    [
        (["break"], {"CANARY_MODE": "raise"}, 66),
        (["break", "fail"], {"CANARY_PROFILE": "ci", "CANARY_MODE": "log"}, 66),
        (["break"], {}, 0),
        (["fail"], {"CANARY_PROFILE": "ci"}, 3),
        ([], {"CANARY_PROFILE": "ci"}, 0),
    ],
    ids=["raise", "ci", "log", "own code", "clean"],
)
def test_an_incident_has_an_exit_code_of_its_own(words, environment, code, plugin, tmp_path):
    """In raise mode and CI, also where the program swallows the exception; else the code is the program's."""
    assert run(tmp_path, *words, **plugin, **environment).returncode == code


def test_incidents_are_a_report_and_annotations(plugin, tmp_path):
    """Well-formed whatever a request is called; a suppressed one is skipped and fails nothing."""
    settings = {**plugin, "CANARY_PROFILE": "ci", "GITHUB_ACTIONS": "true"}
    done = run(tmp_path, "--junit=report.xml", "break", **settings)
    suite = ET.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert "flipped bit" in suite.find("testcase/failure").get("message")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("::error ")]
    assert line.startswith("::error title=KV cache%3A bytes%3Aflipped_bit%3A1%3Abit%3A-::bytes in region full")
    (tmp_path / "known").write_text("bytes:flipped_bit:*  # ticket\n")
    done = run(tmp_path, "--junit=report.xml", "break", CANARY_SUPPRESSIONS="known", **settings)
    assert done.returncode == 0
    assert "stopped" not in done.stdout
    assert ET.parse(tmp_path / "report.xml").getroot().find("testcase/skipped") is not None
