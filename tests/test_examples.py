"""The examples run as printed, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> subprocess.CompletedProcess[str]:
    """Runs one example."""
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


def test_own_pool_reports_the_page_that_two_requests_got():
    """A page handed out twice is found when its first owner is about to read it, with the other one named."""
    done = run("own_pool.py")
    assert "kind=prefix" in done.stderr
    assert "stored_request=bob" in done.stderr
    assert not done.stdout.startswith("0 findings")


def test_transformers_example_is_clean():
    """Clean traffic under guard is checked and raises nothing."""
    pytest.importorskip("transformers", reason="the example needs Transformers, which is not installed")
    words = run("guard_transformers.py").stdout.split()
    requests, checked, findings = int(words[0]), int(words[2]), int(words[5])
    assert (requests, findings) == (4, 0)
    assert checked > 100


def test_every_example_is_tested():
    """An example cannot be forgotten here."""
    assert {p.name for p in EXAMPLES.glob("*.py")} == {"own_pool.py", "guard_transformers.py"}
