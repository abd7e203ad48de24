"""HiCache and PD disaggregation on a GPU: what `hicache.py` and `pd.py` show there, as tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.gpu
@pytest.mark.first
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "script",
    [
        ("hicache.py",),
        ("hicache.py", "--storage"),
        ("pd.py",),
        ("pd.py", "--model", "swa"),
        ("pd.py", "--guard", "decode"),
        ("pd.py", "--stress"),
    ],
    ids=["hicache", "hicache-storage", "pd-llama", "pd-swa", "pd-decode-only", "pd-stress"],
)
def test_records_travel(script, record_property):
    """Every case of the script is as it must be: clean ones raise nothing, each corruption is found on arrival."""
    if script[0] == "pd.py":
        pytest.importorskip("nixl")
    name, *options = script
    done = subprocess.run([sys.executable, str(HERE / name), *options], capture_output=True, text=True, timeout=580)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    record_property("cases", json.dumps([line for line in said if "good" in line]))
    assert [line for line in said if not line.get("good", "error" not in line)] == []
    assert done.returncode == 0, done.stderr[-3000:]
