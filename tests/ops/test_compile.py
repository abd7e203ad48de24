"""Every kernel compiles for a GPU, on a machine that has none: the interpreter takes more than the compiler does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def told_by(script, *arguments, **environment):
    """What a script prints; Triton does not interpret there."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=inherited | environment, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(600)
def test_kernels_that_were_compiled_together_are_ready_to_be_launched(tmp_path):
    """Each was loaded, and had its launcher made, in threads beside each other: up to Triton 3.6 a C compiler makes
    launchers, and one after the other they took most of an engine's first start. The driver is a fake."""
    told = told_by("ready_script.py", TRITON_CACHE_DIR=str(tmp_path))
    assert told["compiled"] > 10
    assert told["loaded"] == told["launchers"] == told["compiled"]
    assert told["in_first"] == 0


@pytest.mark.timeout(600)
def test_another_process_compiles_for_this_one(tmp_path):
    """What it has compiled is in Triton's cache under the names that this process looks for, wherever that looks by
    then. It is asked for nothing that another one compiles, nor for what the cache is known to have. It could make no
    launcher, since there is no driver here, and says so."""
    told = told_by("beside_script.py", TRITON_CACHE_DIR=str(tmp_path))
    assert told["keys"] == told["hits"] >= 1
    assert told["compiled_here"] == told["misses"] == 0
    assert (told["for_others"], told["again"]) == (False, False)
    assert (told["code"], told["took"], told["put_back"]) == (1, True, "/another")


@pytest.mark.timeout(600)
def test_a_kernel_has_the_same_name_in_each_process():
    """Whichever is looked at first. Else another process compiles in vain, and so did an earlier start."""
    first, last = (told_by("names_script.py", order) for order in ("1", "-1"))
    assert len(first) > 40
    assert first == last


TAKES_TURNS = pytest.mark.takes_turns("the first layout; on a GPU all are launched")
OF_STORES = {"note_store_kernel", "compare_stores_kernel"}
"""Not launched for the last layout, whose stores are not checked."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "left_out"),
    [(0, set()), pytest.param(1, set(), marks=TAKES_TURNS), pytest.param(2, OF_STORES, marks=TAKES_TURNS)],
)
def test_every_kernel_compiles_for_a_gpu(layout, left_out):
    """Down to machine code for an H100."""
    compiled = told_by("compile_script.py", str(layout), str(layout + 1))
    assert {
        "check_kernel", "record_kernel", "fingerprint_kernel", "read_check_kernel", "scrub_kernel", "verify_kernel",
        "lifetime_kernel", "adopt_kernel", "gather_blocks_kernel", "note_kernel", "note_store_kernel",
        "compare_stores_kernel", "compare_tables_kernel", "repair_kernel", "prove_kernel", "compare_weights_kernel",
        "compare_kv_kernel",
    } <= compiled.keys()  # fmt: skip
    assert {name for name, count in compiled.items() if not count} == left_out
