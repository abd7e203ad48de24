"""The same flipped bits before SGLang's own canary and before ours, both at work in one engine."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).with_name("beside_builtin.py")


def compare(cell: str) -> list[dict[str, Any]]:
    """Rows of `beside_builtin.py` for a cell."""
    if Version(version("sglang")) < Version("0.5.21"):
        pytest.skip("SGLang's own canary runs on a CPU from 0.5.21 on")
    done = subprocess.run([sys.executable, str(SCRIPT), cell], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.takes_turns(
    "flips in every source, in test_engine; what SGLang's own canary sees changes with SGLang only"
)
@pytest.mark.where(pytest.mark.beyond_ci("the same with MHA"), name="swa")
@pytest.mark.parametrize(("name", "seen"), [("mha", {"k.0", "v.0"}), ("swa", {"k.0", "v.0", "k.1", "v.1"})])
def test_what_the_builtin_misses_is_found(name, seen):
    """Clean traffic raises neither. One bit in any layer's K or V is exactly one finding of ours, which names it; the
    built-in, with all that it has switched on, sees the first layer of each pool only."""
    clean, *rows = compare(f"flips:{name}")
    assert (clean["built_in"], clean["ours"]) == (0, 0)
    assert all(row["exact"] for row in rows)
    assert {row["source"] for row in rows if row["built_in"]} == seen
    assert {row["source"] for row in rows} > seen


@pytest.mark.beyond_ci("nothing: it is a bound of SGLang's own canary, not of ours")
def test_the_builtin_refuses_mla():
    """It ends the engine at its start, for want of a description of the pool."""
    (row,) = compare("flips:mla")
    assert "MLATokenToKVPool" in row["refused"]
