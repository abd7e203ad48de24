"""``canary doctor``, as a user runs it."""

import json
import socket
from pathlib import Path
from unittest.mock import ANY

import pytest
from typer.testing import CliRunner

from canary_core import plugins
from canary_core.config import CanaryConfig
from canary_desk.cli.app import app
from canary_desk.doctor import checks, places

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


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("sglang", None, "ok"), ("sglang", "", "ok"), ("sglang", "mine, canary", "ok"), ("sglang", "mine", "bad"),
        ("vllm", None, "ok"), ("vllm", "", "bad"), ("vllm", "mine,canary", "ok"), ("vllm", "mine, canary", "bad"),
    ],
)  # fmt: skip
def test_an_engines_own_plugin_filter(name, value, verdict, monkeypatch):
    """Where it leaves Canary out, the engine would start unguarded, so the variable is named, and what to set. Each
    engine reads it in its own way."""
    variable = f"{name.upper()}_PLUGINS"
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    found = places.filtered_out(name, f"canary-{name}")
    assert found == (None if verdict == "ok" else ANY)
    if found:
        right = "mine,canary" if value else "canary"
        assert found == f"{variable}={value!r} leaves it out; set {variable}={right}"


def test_a_filter_that_leaves_canary_out_is_bad(monkeypatch):
    """For the plugin that CANARY_PLUGINS names."""
    plugin = plugins.Plugin("vllm", "canary-vllm", hooks=("canary_install",), target=object())
    monkeypatch.setattr(plugins, "installed", lambda: [plugin])
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    found = {c.what: c for c in checks.engines(CanaryConfig.load(plugins="vllm"))}
    assert found["vllm"].verdict == "bad"
    assert "VLLM_PLUGINS='mine' leaves it out" in found["vllm"].text


def settings(**changed: object) -> dict[str, tuple[str, str]]:
    """Verdict and text of each line about settings."""
    return {check.what: (check.verdict, check.text) for check in checks.settings(CanaryConfig.load(**changed))}


def test_a_place_for_bundles(tmp_path):
    """It can be written, or would be made; else it is bad. One that is full is rotated. Nothing is left there."""
    assert "incidents" not in settings()
    there = tmp_path / "there"
    there.mkdir()
    for folder in (there, tmp_path / "not" / "yet"):
        assert settings(incident_dir=str(folder))["incidents"] == ("ok", f"{folder} can be written, 0 bundles")
    assert list(there.iterdir()) == []
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/canary")):
        verdict, text = settings(incident_dir=str(folder))["incidents"]
        assert (verdict, text.startswith(f"no bundle can be written into {folder}: ")) == ("bad", True)
    (there / "incident-1").mkdir()
    full = settings(incident_dir=str(there), incident_most=1)["incidents"]
    assert full == ("ok", f"{there} can be written, 1 bundles")


def test_a_secret_for_the_fingerprints(tmp_path):
    """One that can be used is good, one that everybody may read is noted, and one that is missing or short is bad."""
    assert "keys" not in settings()
    file = tmp_path / "secret"
    assert settings(key_file=str(file))["keys"][0] == "bad"
    file.write_text("sixteen bytes or more")
    for mode, verdict in ((0o600, "ok"), (0o640, "ok"), (0o644, "note")):
        file.chmod(mode)
        assert settings(key_file=str(file))["keys"][0] == verdict
    file.write_text("short")
    assert settings(key_file=str(file))["keys"][0] == "bad"


def test_a_place_for_metrics(tmp_path, monkeypatch):
    """An address of another machine and a folder that is not there are bad; a port that somebody has is passed over."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    assert "metrics" not in settings()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        verdict, text = settings(metrics_listen=str(port))["metrics"]
        assert (verdict, f"port {port} of 127.0.0.1 is taken, so the next free one" in text) == ("note", True)
    assert settings(metrics_listen=str(port))["metrics"][0] == "ok"
    assert settings(metrics_listen="192.0.2.1:9464")["metrics"][0] == "bad"
    assert settings(metrics_listen=str(port), metrics="off")["metrics"][0] == "bad"
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert settings()["metrics"] == ("ok", f"in the files of {tmp_path}")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "gone"))
    gone = settings()["metrics"]
    assert gone == ("bad", f"PROMETHEUS_MULTIPROC_DIR is {tmp_path / 'gone'}, and can't be written: it is not there")


def test_the_self_test_is_nobodys(tmp_path):
    """It writes no bundle where the engine's are, and injects none of the engine's faults."""
    found = lines(CANARY_INCIDENT_DIR=str(tmp_path), CANARY_FAULTS="real_kv_used:warmup=1")
    assert found["no fault"] == ("ok", "nothing found")
    assert list(tmp_path.iterdir()) == []


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
