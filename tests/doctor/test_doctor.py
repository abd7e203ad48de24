"""``canary doctor``, as a user runs it."""

import json

import pytest
from typer.testing import CliRunner

from canary_core.cli.app import app

TOY = """
from canary_core import EngineInfo, HookTarget, hookimpl
CANARY_PROTOCOL = 1
@hookimpl
def canary_engine(): return EngineInfo.of('toy-engine', '>=2,<3')
@hookimpl
def canary_targets(): return TARGETS
@hookimpl
def canary_install(config): ...
@hookimpl
def canary_uninstall(): ...
"""


def doctor(*arguments: str, **environment: str):
    """Runs the command in this process."""
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80", **environment})


def lines(**environment: str) -> dict[str, tuple[str, str]]:
    """Verdict and text of each line, by what it is about."""
    found = json.loads(doctor("--json", "--device", "cpu", **environment).stdout)
    return {check["what"]: (check["verdict"], check["text"]) for check in found}


@pytest.mark.parametrize(
    ("version", "targets", "allowed", "verdict", "text"),
    [
        ("2.4", "['toy_runner.step']", True, "ok", "would guard toy-engine 2.4 (tested)"),
        ("2.4", "['toy_runner.step']", False, "note", "CANARY_PLUGINS does not name it"),
        ("2.4", "['toy_runner.stop']", True, "bad", "toy_runner.stop is not there (there is step)"),
        ("2.4", "['toy_runner.stop']", False, "note", "toy_runner.stop is not there (there is step)"),
        ("2.4", "['toy_broken.step']", True, "bad", "ImportError: no CUDA here"),
        ("2.4", "1 / 0", True, "bad", "ZeroDivisionError"),
        ("1.4", "[]", True, "bad", "supports toy-engine >=2,<3, got toy-engine 1.4"),
        (None, "[]", True, "bad", "which is not installed"),
    ],
)
def test_which_plugin_would_guard_and_why_not(version, targets, allowed, verdict, text, distribution):
    """By the engine's version and by the functions that the plugin hooks. What CANARY_PLUGINS names and would not guard
    is bad; another plugin's reason is worth a note."""
    if version:
        modules = {"toy_runner": "def step(): ...", "toy_broken": "raise ImportError('no CUDA here')"}
        distribution("toy-engine", modules, version=version)
    distribution("canary-toy", {"canary_sample": TOY.replace("TARGETS", targets)}, {"toyish": "canary_sample"})
    found = lines(CANARY_PLUGINS="toyish" if allowed else "")
    assert found["toyish"][0] == verdict
    assert text in found["toyish"][1]


def test_names_that_are_not_installed_and_settings_that_are_none():
    """Both are bad, with what was probably meant; somebody else's variable is worth a note."""
    found = lines(CANARY_PLUGINS="transfromers", CANARY_MOED="raise", CANARY_SERVICE_HOST="10.0.0.1")
    assert found["transfromers"][0] == "bad"
    assert "Did you mean 'transformers'" in found["transfromers"][1]
    assert found["CANARY_MOED"] == ("bad", "no setting; did you mean CANARY_MODE?")
    assert found["CANARY_SERVICE_HOST"][0] == "note"


def test_the_report_fits_80_columns_and_ends_with_a_verdict():
    """Exit code 0 where nothing is bad, 1 where something is."""
    good = doctor("--device", "cpu")
    assert good.exit_code == 0, good.output
    assert max(map(len, good.stdout.splitlines())) <= 80
    assert good.stdout.rstrip().endswith("nothing is wrong")
    for part in ("machine", "settings", "plugins", "control", "self-test", "back end", "torch on cpu"):
        assert part in good.stdout
    bad = doctor("--device", "cpu", CANARY_PLUGINS="nobody")
    assert bad.exit_code == 1
    assert bad.stdout.rstrip().endswith("1 bad")


def test_a_device_that_is_not_there_is_one_sentence():
    """Exit code 2."""
    result = doctor("--device", "cuda:99")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("canary: there is no device 'cuda:99'")
