"""The ``canary`` command, as a user runs it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import canary_core
from canary_core.config import CanaryConfig
from canary_desk.cli.app import app


def run(*arguments: str, **environment: str) -> Result:
    """Runs the command in this process, on a wide terminal."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **environment})


def test_version():
    """``canary --version`` prints the version."""
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"canary {canary_core.__version__}\n")


def test_shells_can_complete():
    """``canary`` offers typer's completion for shells."""
    assert "--install-completion" in run("--help").output


def test_plugins_as_json(distribution):
    """``canary plugins --json`` gives one object per plugin, allowed or not, with a broken one's error."""
    distribution("canary-eye", {"canary_eye": "1/0"}, {"eye": "canary_eye"}, version="0.7")
    result = run("plugins", "--json", CANARY_PLUGINS="eye")
    found = {p["name"]: p for p in json.loads(result.output)}
    assert result.exit_code == 0
    assert [(p["allowed"], p["error"]) for p in (found["reporting"], found["faults"])] == [(True, None)] * 2
    eye = found["eye"]
    assert eye.pop("error").endswith("ZeroDivisionError: division by zero")
    assert eye == {
        "name": "eye", "version": "0.7", "distribution": "canary-eye", "allowed": True, "hooks": [], "engine": None,
        "protocol": None, "warnings": [],
    }  # fmt: skip


def test_plugins_show_engine_and_version(distribution):
    """The engine is shown with its installed version and whether it is supported, without importing it."""
    source = (
        "from canary_core import EngineInfo, hookimpl\n"
        "@hookimpl\ndef canary_engine():\n    return EngineInfo.of('toy-engine', '>=2')\n"
    )
    distribution("toy-engine", {}, version="1.9")
    distribution("canary-toy", {"canary_sample": source}, {"toy": "canary_sample"})
    (toy,) = (p for p in json.loads(run("plugins", "--json").output) if p["name"] == "toy")
    assert toy["engine"] == {
        "name": "toy-engine", "version": "1.9", "supported_range": ">=2", "supported": False, "status": "too_old",
        "reason": "",
    }  # fmt: skip
    table = run("plugins").output
    assert "toy-engine 1.9" in table
    assert "needs >=2" in table


@pytest.mark.parametrize(
    ("version", "status", "environment", "shown"),
    [
        ("2.4", "tested", {}, "toy-engine 2.4 (tested)"),
        ("3.1", "newer", {}, "toy-engine 3.1 is newer than tested (>=2,<3): guarded if"),
        ("3.1", "newer", {"CANARY_UNTESTED": "refuse"}, "(>=2,<3): refused, since CANARY_UNTESTED=refuse"),
        ("1.9", "too_old", {}, "toy-engine 1.9 is not supported; needs >=2,<3"),
        ("2.5", "known_bad", {}, "toy-engine 2.5 is known to be bad and refused: it frees blocks twice"),
        (None, "not_installed", {}, "toy-engine is not installed; needs >=2,<3"),
    ],
)  # fmt: skip
def test_plugins_show_what_becomes_of_the_engine(version, status, environment, shown, distribution):
    """Each of the sorts of versions has its line, and its word in the JSON."""
    source = (
        "from canary_core import EngineInfo, hookimpl\nCANARY_PROTOCOL = 1\n@hookimpl\n"
        "def canary_engine(): return EngineInfo.of('toy-engine', '>=2,<3', {'==2.5': 'it frees blocks twice'})\n"
    )
    if version:
        distribution("toy-engine", {}, version=version)
    distribution("canary-toy", {"canary_sample": source}, {"toy": "canary_sample"})
    (toy,) = (p for p in json.loads(run("plugins", "--json").output) if p["name"] == "toy")
    reason = "it frees blocks twice" if status == "known_bad" else ""
    assert (toy["engine"]["status"], toy["engine"]["reason"], toy["protocol"]) == (status, reason, 1)
    assert shown in " ".join(run("plugins", **environment).output.split())


def test_plugins_show_protocol_and_what_is_missing(distribution):
    """A plugin without a number is taken as 1, and half a plugin has a warning; one for another protocol an error."""
    half = "from canary_core import hookimpl\n@hookimpl\ndef canary_install(config): ...\n"
    distribution("canary-half", {"canary_half": half}, {"half": "canary_half"})
    distribution("canary-later", {"canary_later": half + "CANARY_PROTOCOL = 3"}, {"later": "canary_later"})
    found = {p["name"]: p for p in json.loads(run("plugins", "--json").output)}
    assert (found["half"]["protocol"], found["later"]["protocol"], found["reporting"]["protocol"]) == (None, 3, 1)
    assert [w.partition(":")[0] for w in found["half"]["warnings"]] == [
        "plugin 'half' has canary_install without canary_engine",
        "plugin 'half' has canary_install without canary_uninstall",
    ]
    assert "speaks protocol 3" in found["later"]["error"]
    table = run("plugins").output
    for part in ("none declared, taken as 1", "canary_install without canary_uninstall", "speaks protocol 3"):
        assert part in table


def test_plugins_fit_80_columns(distribution):
    """On a terminal of 80 columns no line is longer, and every name is in one piece."""
    source = (
        "from canary_core import EngineInfo, hookimpl\n"
        "@hookimpl\ndef canary_engine():\n    return EngineInfo.of('toy-engine', '>=2.10.1,<3.0.5')\n"
        "@hookimpl\ndef canary_uninstall(): ...\n"
    )
    distribution("toy-engine", {}, version="2.10.4")
    distribution(
        "canary-toy-transformers", {"canary_sample": source}, {"toytransformers": "canary_sample"}, version="0.10.0"
    )
    distribution("canary-gone", {"canary_gone": source.replace("toy-engine", "absent-engine")}, {"gone": "canary_gone"})
    distribution("canary-odd", {"canary_odd": "raise ValueError('no such thing ' * 40)"}, {"odd": "canary_odd"})
    table = run("plugins", COLUMNS="80").output
    assert max(map(len, table.splitlines())) <= 80
    for word in (
        "toytransformers", "canary-toy-transformers", "0.10.0", "toy-engine 2.10.4", "canary_uninstall",
        "canary_violation", "absent-engine", ">=2.10.1,<3.0.5", "reporting", "canary-core",
    ):  # fmt: skip
        assert word in table


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=["table", "json"])
def test_plugins_say_what_is_not_installed(arguments, distribution):
    """A name in CANARY_PLUGINS that is not installed is told with the installed ones and what to do; exit code 2."""
    distribution("canary-eye", {"canary_eye": "1/0"}, {"eye": "canary_eye"})
    result = run("plugins", *arguments, CANARY_PLUGINS="eye,eyes,zebra")
    assert result.exit_code == 2
    eyes, zebra = result.stderr.splitlines()
    assert eyes.startswith("canary: CANARY_PLUGINS names 'eyes', which is not installed; installed plugins: ")
    assert "eye" in re.findall(r"\w+", eyes.partition("installed plugins: ")[2].partition(".")[0])
    assert eyes.endswith("Did you mean 'eye'?")
    assert zebra.endswith("Correct the name, or install the distribution that has the plugin")
    if arguments:
        listed = {p["name"]: p for p in json.loads(result.stdout)}
        assert listed["eyes"]["error"] == eyes.removeprefix("canary: ")
        assert (listed["eyes"]["allowed"], listed["eyes"]["distribution"]) == (True, None)
    else:
        assert "canary-eye" in result.stdout


def test_a_built_in_plugin_needs_no_name():
    """Whoever names one in CANARY_PLUGINS is told to take it out, not to install it."""
    result = run("plugins", CANARY_PLUGINS="faults")
    assert result.exit_code == 2
    assert (
        result.stderr == "canary: CANARY_PLUGINS names 'faults', which is part of Canary and always on; take it out\n"
    )


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


def test_config_fits_a_terminal_of_80_columns(monkeypatch):
    """No variable is cut to pieces, and a value that was set stands beside its default."""
    monkeypatch.delenv("CANARY_SILENCE_S")
    lines = run("config", COLUMNS="80", CANARY_LOG_LEVEL="error").output.splitlines()
    assert max(map(len, lines)) <= 80
    cells = {line.split("│")[1].strip() for line in lines if line.startswith("│")}
    assert {f"CANARY_{name.upper()}" for name in CanaryConfig.model_fields} == cells - {""}
    details = [" ".join(line.split("│")[2].split()) for line in lines if line.startswith("│")]
    assert details.count("now error") == 1
    assert sum(line.startswith("now ") for line in details) == 1


@pytest.mark.usefixtures("fresh_process")
def test_config_tells_a_misspelt_setting(logs):
    """A variable that is no setting is told on stderr, by an event; the command does its work all the same."""
    result = run("config", "--json", CANARY_MOED="raise")
    assert result.exit_code == 0
    assert json.loads(result.stdout)
    (event,) = logs
    assert (event["event"], event["hint"]) == ("unknown_setting", "did you mean CANARY_MODE?")


def test_config_shows_a_budget_as_it_was_written():
    """What was read is shown in the words of whoever wrote it."""
    found = {s["variable"]: s for s in json.loads(run("config", "--json", CANARY_SCRUB_BUDGET="1.50 %").output)}
    assert (found["CANARY_SCRUB_BUDGET"]["default"], found["CANARY_SCRUB_BUDGET"]["value"]) == ("0.1%", "1.50 %")


@pytest.mark.parametrize("command", ["plugins", "config"])
@pytest.mark.parametrize(
    ("variable", "value"), [("CANARY_MODE", "loud"), ("CANARY_SCRUB_BUDGET", "nonsense"), ("CANARY_FAULTS", "bitrot")]
)
def test_bad_setting_is_one_sentence(command, variable, value):
    """A bad setting ends the command with one sentence that has its name and value, and exit code 2, no traceback."""
    result = run(command, **{variable: value})
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"canary: {variable}")
    assert repr(value) in line


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CANARY_SCRUB_BUDGET", "101%"),
        ("CANARY_SCRUB_BUDGET", "-1%"),
        ("CANARY_SCRUB_BUDGET", "9999999EiB"),
        ("CANARY_SCRUB_BUDGET", "9" * 400),
        ("CANARY_READ_CHECK", "-2"),
        ("CANARY_READ_CHECK", "1" + "0" * 20),
        ("CANARY_CHECK_BUDGET", "-1"),
        ("CANARY_CHECK_BUDGET", "1" + "0" * 20),
        ("CANARY_SWEEP_INTERVAL", "-1"),
        ("CANARY_DIVERGENCE_INTERVAL", "-1"),
        ("CANARY_STATE_INTERVAL", "0"),
        ("CANARY_READ_INTERVAL", "0"),
        ("CANARY_RING_ROWS", "0"),
        ("CANARY_RING_ROWS", "1048577"),
        ("CANARY_STATS_INTERVAL", "-1"),
        ("CANARY_SILENCE_S", "-1"),
        ("CANARY_SILENCE_S", "nan"),
        ("CANARY_SILENCE_S", "inf"),
        ("CANARY_RANK", "-1"),
        ("CANARY_METRICS_LISTEN", "0"),
        ("CANARY_METRICS_LISTEN", "65536"),
        ("CANARY_METRICS_LISTEN", "localhost"),
        ("CANARY_METRICS_LISTEN", ":::9464"),
        ("CANARY_FAULTS", "lost_write:probability=2"),
    ],
)
def test_config_refuses_what_the_engine_would_refuse(variable, value):
    """A size, share or number outside its limits is refused by ``canary config``, not only when an engine starts."""
    result = run("config", **{variable: value})
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"canary: {variable}")
    assert value.partition("=")[2] or value in line


def test_runs_as_a_module():
    """``python -m canary_core`` is the same command."""
    done = subprocess.run(
        [sys.executable, "-m", "canary_core", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("canary ")


GUARDED = """
from canary_core import ViolationError, hookimpl

@hookimpl
def canary_install(config):
    print("installed", flush=True)

@hookimpl
def canary_uninstall():
    print("uninstalled", flush=True)
    FINDING
"""


def run_toy(tmp_path: Path, *arguments: str, plugin: str = GUARDED, **environment: str):
    """``canary run`` in a process of its own, beside a distribution with the plugin ``toy``."""
    info = tmp_path / "canary_sample-1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: canary-toy\nVersion: 1\n")
    info.joinpath("entry_points.txt").write_text("[canary]\ntoy = canary_sample\n")
    tmp_path.joinpath("canary_sample.py").write_text(plugin.replace("FINDING", "pass"))
    tmp_path.joinpath("beside.py").write_text("word = 'beside'\n")
    tmp_path.joinpath("serve.py").write_text(
        "import sys, beside\n"
        "print(__name__, beside.word, *sys.argv[1:], flush=True)\n"
        "sys.exit(3 if 'fail' in sys.argv else 0)\n"
    )
    paths = os.pathsep.join(str(p) for p in (tmp_path, Path(canary_core.__file__).parents[1]))
    env = {**os.environ, "CANARY_PLUGINS": "toy", "PYTHONPATH": paths, **environment}
    command = [sys.executable, "-m", "canary_core", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)


@pytest.mark.parametrize(
    "arguments", [["serve.py", "--port", "1"], ["-m", "serve", "--port", "1"]], ids=["file", "module"]
)
def test_run_guards_a_program(arguments, tmp_path):
    """``canary run`` installs the allowed plugins, runs the program as __main__ with its own arguments, and undoes."""
    done = run_toy(tmp_path, *arguments)
    assert done.stdout.splitlines() == ["installed", "__main__ beside --port 1", "uninstalled"]
    assert done.returncode == 0


def test_run_keeps_the_exit_code(tmp_path):
    """The program's exit code is the command's, and the plugins are undone all the same."""
    done = run_toy(tmp_path, "serve.py", "fail")
    assert done.returncode == 3
    assert done.stdout.endswith("uninstalled\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.py"], "canary: no such file: 'missing.py'; give the path of a Python file, or -m and"),
        (["-m", "missing"], "canary: can't run 'missing': No module named missing; check the name"),
        (["folder"], "canary: can't run 'folder': can't find '__main__' module in 'folder'; check the name"),
    ],
    ids=["file", "module", "folder"],
)
def test_run_says_in_one_sentence_that_there_is_no_such_program(arguments, sentence, tmp_path):
    """A program that does not exist is exit code 2 and one sentence, not a traceback."""
    tmp_path.joinpath("folder").mkdir()
    done = run_toy(tmp_path, *arguments, CANARY_LOG_LEVEL="error")
    (line,) = done.stderr.splitlines()
    assert line.startswith(sentence)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("is_module", "source"),
    [
        (False, "try:\n    open('no such file')\nexcept OSError as e:\n    raise ValueError('y') from e\n"),
        (True, "import no_such_module\n"),
        (False, "def f(:\n"),
        (False, "import sys\nsys.exit('a word')\n"),
        (False, "import sys\nsys.excepthook = lambda *e: print('own hook', e[0].__name__, file=sys.stderr)\n1/0\n"),
    ],
    ids=["cause", "import", "syntax", "exit", "hook"],
)
def test_run_shows_the_programs_own_error_only(is_module, source, tmp_path):
    """A program that fails prints and exits as it does under ``python``: no frame of ours, the same exit code."""
    tmp_path.joinpath("failing.py").write_text(source)
    name = ["-m", "failing"] if is_module else [str(tmp_path / "failing.py")]
    done = run_toy(tmp_path, *name, CANARY_LOG_LEVEL="error")
    bare = subprocess.run([sys.executable, *name], capture_output=True, text=True, check=False, cwd=tmp_path)
    # Python itself runs a module by runpy, a file with source lines before 3.11.
    expected = re.sub(r'  File "(<frozen runpy>|.*runpy\.py)".*\n(    .*\n)?', "", bare.stderr)
    assert done.stderr == expected
    assert done.returncode == bare.returncode != 0
    assert done.stdout == "installed\nuninstalled\n"


def test_run_fails_on_a_late_finding(tmp_path):
    """In raise mode a finding that only closing brings still makes the command fail."""
    done = run_toy(tmp_path, "serve.py", plugin=GUARDED.replace("FINDING", "raise ViolationError('slot 5')"))
    assert done.returncode != 0
    assert "ViolationError: slot 5" in done.stderr


def test_run_without_its_plugin_stops_before_the_program(tmp_path):
    """A plugin that is not installed ends the command before the program starts."""
    done = run_toy(tmp_path, "serve.py", CANARY_PLUGINS="nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'nope'" in done.stderr


def test_run_with_a_broken_plugin(tmp_path):
    """In raise mode a plugin that can't be loaded ends the command too: nothing passes unguarded."""
    done = run_toy(tmp_path, "serve.py", plugin="1/0", CANARY_MODE="raise")
    assert (done.returncode, done.stdout) == (2, "")
    assert "ZeroDivisionError" in done.stderr


def test_run_says_when_nothing_is_guarded(tmp_path):
    """With CANARY_PLUGINS empty the program runs, and one line on stderr says that nothing is guarded."""
    done = run_toy(tmp_path, "serve.py", CANARY_PLUGINS="")
    assert done.stdout == "__main__ beside\n"
    assert "nothing is guarded" in done.stderr


def test_run_tells_a_misspelt_setting_once(tmp_path):
    """Before the program starts; in the format that was asked for."""
    done = run_toy(tmp_path, "serve.py", CANARY_MOED="raise", CANARY_LOG_FORMAT="json")
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [e["hint"] for e in events if e["event"] == "unknown_setting"] == ["did you mean CANARY_MODE?"]
    assert done.returncode == 0


def test_run_refuses_to_guard_nothing_in_raise_mode(tmp_path):
    """In raise mode a program without any plugin is not started: a test that was to be guarded must not pass."""
    done = run_toy(tmp_path, "serve.py", CANARY_PLUGINS="", CANARY_MODE="raise")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("canary: CANARY_MODE=raise, but CANARY_PLUGINS is empty, so nothing would be guarded")


OFFERS = """
from canary_toy.session import ToyConformance
from canary_core import hookimpl

class Suite(ToyConformance):
    plugin = "nowhere"
    abilities = frozenset({"names"})
    lacking = {"fork": "the engine runs each request once"}

@hookimpl
def canary_install(config): ...
@hookimpl
def canary_uninstall(): ...
@hookimpl
def canary_conformance():
    return Suite
"""


def test_check_plugin_lists_the_names_that_it_takes(distribution):
    """``--list`` runs nothing; with ``--only`` it gives what would run."""
    distribution("canary-eye", {"canary_eye": OFFERS}, {"eye": "canary_eye"})
    names = run("check-plugin", "eye", "--list").output.split()
    assert "test_forks_are_silent" in names
    assert len(names) > 30
    assert run("check-plugin", "eye", "--list", "--only", "forks").output == "test_forks_are_silent\n"


def test_check_plugin_says_which_test_failed_and_why_one_was_not_tried(distribution):
    """By the name that ``--only`` takes, and with the author's own reason."""
    distribution("canary-eye", {"canary_eye": OFFERS}, {"eye": "canary_eye"})
    result = run("check-plugin", "eye", "--only", "forks_are", "--only", "guards_the_pool")
    assert result.exit_code == 1
    assert "    test_a_canary_guards_the_pool\n" in result.output
    assert "'fork' is not declared: the engine runs each request once" in result.output
    assert result.output.endswith("eye: 0 passed, 1 failed, 1 undeclared\n")
