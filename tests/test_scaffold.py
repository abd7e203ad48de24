"""``canary new-plugin``: what is written, what is refused, and that it works as written."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support import pytest_runs
from support.code_lines import code_lines
from support.distributions import installed
from typer.testing import CliRunner

from canary_core.errors import PluginError
from canary_core.testing import ABILITIES
from canary_desk.cli.app import app
from canary_kit import scaffold

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "canary-toy"
GUIDE = ROOT / "docs" / "plugin-author.md"
LITTER = {"__pycache__", ".pytest_cache", ".ruff_cache", "canary_toy.egg-info"}


def new_plugin(*arguments: str) -> Result:
    """Runs ``canary new-plugin`` in this process."""
    return CliRunner().invoke(app, ["new-plugin", *arguments], env={"COLUMNS": "200"})


def texts(folder: Path) -> dict[str, str]:
    """Every file below ``folder``, but for what tools leave there."""
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not LITTER & set(file.relative_to(folder).parts)
    }


def test_the_example_is_what_the_command_writes(tmp_path):
    """examples/canary-toy is the plugin ``toy``, file by file. To change it change the templates in
    src/canary_kit/scaffold, delete the folder, and run ``canary new-plugin toy --into examples``."""
    scaffold.write(scaffold.Names("toy"), tmp_path)
    written, example = texts(tmp_path / "canary-toy"), texts(EXAMPLE)
    assert written.keys() == example.keys()
    assert [name for name, text in written.items() if example[name] != text] == []


def test_the_plugin_of_another_name_passes_its_tests(tmp_path):
    """Nothing is installed and nothing was changed: the tests under guard and the conformance suite are green, and a
    plugin of two words has its name everywhere."""
    assert new_plugin("my_acme", "--into", str(tmp_path)).exit_code == 0
    folder = tmp_path / "canary-my-acme"
    done = pytest_runs.run(folder, folder / "src")
    assert done.passed > 30
    assert (done.failed, done.returncode) == (0, 0), done.output


@pytest.mark.parametrize("name", ["acme", "my_acme"])
def test_only_the_engine_is_still_called_toy(tmp_path, name):
    """Names are those that were asked for; modules and classes, too."""
    scaffold.write(scaffold.Names(name), tmp_path)
    names = scaffold.Names(name)
    files = texts(tmp_path / names.distribution)
    left = re.compile(r"toy(?!_engine| engine| paged engine)", re.IGNORECASE)
    assert {name: found for name, text in files.items() if (found := left.findall(text))} == {}
    assert f'{name} = "{names.package}.plugin"' in files["pyproject.toml"]
    assert f"class {names.title}Pool(PoolAdapter)" in files[f"src/{names.package}/pool.py"]


def test_the_toy_plugin_takes_150_lines():
    """A paged engine with a prefix cache, forks and roll backs is guarded by 150 lines of code, without blank lines,
    comments and docstrings."""
    files = [EXAMPLE / "src" / "canary_toy" / f"{name}.py" for name in ("pool", "batch", "hooks", "plugin")]
    assert sum(len(code_lines(file.read_text())) for file in files) <= 150


def test_the_guide_shows_what_is_printed(tmp_path, monkeypatch):
    """docs/plugin-author.md has the command's own output."""
    monkeypatch.chdir(tmp_path)
    assert f"```text\n{new_plugin('myengine').stdout}```" in GUIDE.read_text()


def test_the_guide_shows_the_whole_plugin(tmp_path):
    """``plugin.py`` as it is written, without docstrings."""
    scaffold.write(scaffold.Names("myengine"), tmp_path)
    written = (tmp_path / "canary-myengine" / "src" / "canary_myengine" / "plugin.py").read_text()
    code = re.sub(r'^ *""".*?"""\n', "", written, flags=re.M | re.S).lstrip()
    assert f"```python\n{code}```" in GUIDE.read_text()


def test_the_guide_has_every_ability():
    """In a row of a table, with what the session needs."""
    rows = "".join(line.split("|")[1] for line in GUIDE.read_text().splitlines() if line.startswith("| "))
    assert [ability for ability in ABILITIES if f"`{ability}`" not in rows] == []


def test_what_the_guide_runs_prints_what_it_shows(tmp_path):
    """The script of step 3 finds its stray write, as shown; without it the audit of step 9 is silent, as shown."""
    scaffold.write(scaffold.Names("myengine"), tmp_path)
    path = installed(tmp_path / "canary-myengine", tmp_path / "site")
    (script,) = re.findall(r"^```python\n(from canary_myengine.*?)^```", GUIDE.read_text(), re.M | re.S)
    stray = run_guarded(path, tmp_path / "serve.py", script, CANARY_READ_CHECK="-1")
    (finding,) = (e for e in stray if e["event"] == "incident")
    shown = {"half": "k", "layer": 1, "page": 3, "position": 9, "request": "alice", "slot": 13, "step": 5}
    assert {name: finding[name] for name in shown} == shown
    clean = "".join(line for line in script.splitlines(True) if "stray write" not in line)
    (audit,) = (e for e in run_guarded(path, tmp_path / "clean.py", clean, CANARY_AUDIT="100") if e["event"] == "audit")
    numbers = {name: audit[name] for name in ("forwards", "unclaimed_bytes", "written_slots")}
    assert [
        f"{name}={number}" for name, number in numbers.items() if f" {name}={number}" not in GUIDE.read_text()
    ] == []
    # How many bytes of a number differ from what was there depends on how this processor rounds.
    (changed,) = re.findall(r"audit  changed_bytes=(\d+) ", GUIDE.read_text())
    assert audit["changed_bytes"] == pytest.approx(int(changed), rel=0.01)


def run_guarded(path: str, file: Path, script: str, **settings: str) -> list[dict[str, Any]]:
    """The events of ``canary run`` on ``script``, guarded by the plugin ``myengine``."""
    file.write_text(script)
    fixed = {"PYTHONPATH": path, "CANARY_PLUGINS": "myengine", "CANARY_LOG_FORMAT": "json", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "canary_core", "run", str(file)]
    env = {**os.environ, **fixed, **settings}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_it_prints_what_it_wrote_and_what_comes_next(tmp_path):
    """Every file, and the commands that install and test it."""
    result = new_plugin("acme", "--into", str(tmp_path))
    assert result.exit_code == 0
    for file in texts(tmp_path):
        assert str(tmp_path / file) in result.output
    for line in (f"cd {tmp_path / 'canary-acme'}", "pip install -e '.[test]'", "pytest", "canary check-plugin acme"):
        assert f"\n  {line}\n" in result.output


def test_the_folder_is_made(tmp_path):
    """``--into`` need not exist."""
    assert new_plugin("acme", "--into", str(tmp_path / "a" / "b")).exit_code == 0
    assert (tmp_path / "a" / "b" / "canary-acme" / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("name", "near"),
    [("Acme", "acme"), ("my-engine", "my_engine"), ("1x", "x"), ("a__b", "a_b"), ("../up", "up"), ("a b", "a_b")],
)
def test_a_name_that_is_none_is_refused_with_one_that_is(tmp_path, name, near):
    """Exit code 2, a sentence with what was given and what would do, and nothing is written."""
    result = new_plugin(name, "--into", str(tmp_path))
    assert result.exit_code == 2
    assert f"got {name!r}" in result.stderr
    assert f"for example {near}" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "_", "7", "ä"])
def test_a_name_without_a_letter_is_refused(name):
    """There is nothing to propose."""
    with pytest.raises(PluginError, match=r"name it after its engine$"):
        scaffold.Names(name)


def test_the_name_of_an_installed_plugin_is_refused(tmp_path, distribution):
    """Two plugins of one name could not be told apart in ``CANARY_PLUGINS``."""
    distribution("canary-eye", {"an_eye": ""}, {"eye": "an_eye"}, version="0.7")
    result = new_plugin("eye", "--into", str(tmp_path))
    assert result.exit_code == 2
    assert "'eye' is installed already (canary-eye 0.7)" in result.stderr
    assert "another name" in result.stderr


@pytest.mark.parametrize("name", ["core", "adapters"])
def test_the_name_of_an_installed_package_is_refused(tmp_path, name):
    """Canary's own packages are taken."""
    result = new_plugin(name, "--into", str(tmp_path))
    assert result.exit_code == 2
    assert f"'canary_{name}' is installed already" in result.stderr


def test_nothing_is_overwritten(tmp_path):
    """A second time is refused, and what is there stays what it is."""
    assert new_plugin("acme", "--into", str(tmp_path)).exit_code == 0
    readme = tmp_path / "canary-acme" / "README.md"
    readme.write_text("mine")
    result = new_plugin("acme", "--into", str(tmp_path))
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert readme.read_text() == "mine"


def test_a_file_is_no_folder(tmp_path):
    """``--into`` a file is refused with the reason."""
    tmp_path.joinpath("file").write_text("")
    result = new_plugin("acme", "--into", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "can't be written" in result.stderr
    assert "--into" in result.stderr


def test_the_wheel_has_the_templates(tmp_path):
    """An installed Canary writes the same plugin as the repository's."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*command, "-w", str(tmp_path), str(source)], check=True, capture_output=True, text=True, timeout=240
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    code = "from pathlib import Path; from canary_kit import scaffold; scaffold.write(scaffold.Names('toy'), Path())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, timeout=120)
    assert texts(tmp_path / "canary-toy") == texts(EXAMPLE)
