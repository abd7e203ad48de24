"""An engine's start, with a process that compiles beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("start_script.py")


def started(device, cache):
    """What the script prints; with Triton's cache in the folder ``cache``."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), device], env=inherited | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
def test_no_kernel_is_compiled_in_the_engine_s_process(tmp_path):
    """Another one does it while the engine captures a graph, where nothing of Canary's is loaded; then all of it is
    found in the cache, launchers, too. The next start has nothing to wait for."""
    cold, warm = started("cuda", tmp_path), started("cuda", tmp_path)
    assert (cold["put_off"], warm["put_off"]) == (True, False)
    assert cold["loaded_early"] == 0
    for told in (cold, warm):
        assert told["hits"] > 10
        assert told["misses"] == told["violations"] == 0
        assert told["enabled"]
    (fields,) = cold["warmed_up"]
    assert fields["beside_s"] > 0
    assert "reason" not in fields
    assert "beside_s" not in warm["warmed_up"][0]


def test_on_a_cpu_nothing_is_put_off(tmp_path):
    """Nothing is compiled there."""
    told = started("cpu", tmp_path)
    assert not told["put_off"] or not told["warmed_up"]
    assert (told["hits"], told["misses"], told["violations"], told["enabled"]) == (0, 0, 0, True)
