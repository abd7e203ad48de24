"""The examples run as printed, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import pytest_runs
from support.code_lines import code_lines
from support.distributions import installed

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = ["own_pool.py", "guard_transformers.py", "verify_toy.py"]
DISTRIBUTIONS = ["canary-findings-file", "canary-toy"]
THIRD_PARTY = ["canary-mini-infer"]
"""Plugins for engines from the package index: `make test` runs their tests, once."""


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with ``command``."""
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    return done


def test_own_pool_reports_the_page_that_two_requests_got():
    """A page handed out twice is found when its first owner is about to read it, with the other one named."""
    done = run(EXAMPLES / "own_pool.py")
    assert "kind=prefix" in done.stderr
    assert "stored_request=bob" in done.stderr
    assert not done.stdout.startswith("0 findings")


def test_requests_of_the_toy_are_verified():
    """Fresh ones, once enough have taught the noise; then KV that other weights have computed is told."""
    told = run(EXAMPLES / "verify_toy.py", PYTHONPATH=str(EXAMPLES / "canary-toy" / "src")).stdout
    answers = [told.split(f"request {i}: ")[1].split()[0].strip(",") for i in range(7)]
    assert answers == ["unjudged"] * 5 + ["same", "differs"]
    assert "kv k.0" in told


def test_transformers_example_is_clean():
    """Clean traffic under guard is checked and raises nothing."""
    pytest.importorskip("transformers", reason="the example needs Transformers, which is not installed")
    words = run(EXAMPLES / "guard_transformers.py").stdout.split()
    requests, checked, findings = int(words[0]), int(words[2]), int(words[5])
    assert (requests, findings) == (4, 0)
    assert checked > 100


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_tests_of_a_distribution_pass(name):
    """What an author starts from is green."""
    folder = EXAMPLES / name
    done = pytest_runs.run(folder, folder / "src")
    assert done.passed > 3
    assert (done.failed, done.returncode) == (0, 0), done.output


def test_the_reporter_hears_of_findings_through_its_entry_point(tmp_path):
    """As its README says: with ``canary run`` and ``CANARY_PLUGINS`` the findings of a program land in the file."""
    path = installed(EXAMPLES / "canary-findings-file", tmp_path)
    file = tmp_path / "findings.jsonl"
    command = ("-m", "canary_core", "run", EXAMPLES / "own_pool.py")
    done = run(*command, PYTHONPATH=path, CANARY_PLUGINS="findings_file", FINDINGS_FILE=str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert f"{len(lines)} findings" in done.stdout
    assert {line["event"] for line in lines} == {"finding"}
    assert "bob" in {line.get("stored_request") for line in lines}


def test_a_third_party_engine_takes_200_lines():
    """The plugin of mini-infer has at most so many lines of code, without blank lines, comments and docstrings."""
    sources = EXAMPLES / "canary-mini-infer" / "src" / "canary_mini_infer"
    files = [sources / f"{name}.py" for name in ("pool", "batch", "hooks", "plugin")]
    assert sum(len(code_lines(file.read_text())) for file in files) <= 200


def test_every_example_is_tested_and_listed():
    """An example cannot be forgotten here, nor in the list of examples."""
    found = {p.name for p in EXAMPLES.iterdir() if p.suffix == ".py" or p.is_dir()}
    # The bundle is explained in tests/explain, the files of a deployment are validated in tests/test_deploy.py.
    assert found == {*SCRIPTS, "incident", "deploy", *DISTRIBUTIONS, *THIRD_PARTY}
    listed = EXAMPLES.joinpath("README.md").read_text()
    assert [name for name in found if f"({name}" not in listed] == []
