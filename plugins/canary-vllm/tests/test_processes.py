"""Engines that want a process of their own, or several."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, multiprocess
from vllm_on_cpu.scripts import told_by

HERE = Path(__file__).parent
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("processes")]


@pytest.mark.parametrize(
    ("options", "regions"),
    [
        pytest.param(("llama",), ["full"], marks=pytest.mark.beyond_ci("the same with a draft model")),
        pytest.param(("llama", "eagle"), ["full", "draft"], marks=pytest.mark.takes_turns("the V1 runner")),
        pytest.param(
            ("lfm2",), ["full", "state"], marks=pytest.mark.beyond_ci("a draft model, and states of the V1 runner")
        ),
    ],
)
def test_the_v2_runner_is_guarded(options, regions):
    """The V2 runner, with Triton's interpreter: silent under preemption and prefix hits, answers as without Canary, a
    table compared in each forward, the layers of a draft model are guarded, and so are states that the prefix cache
    keeps; a flipped bit is named, also between a store and the end of the forward, and so are requests that get each
    other's token, and a cached state that changed before another request reused it."""
    told = told_by("v2_script", *options)
    assert told["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert told["trouble"] == []
    assert told["same"]
    assert told["audits"] == [0]
    assert told["forwards"] > 10
    assert told["found"] == [["BYTES", 1, "v", 0, "flip"]]
    lengths = {"seq_lens", "query_start_loc"}
    assert {name.split(" of ")[0] for name in told["tables"]} == {"block_table", "slot_mapping"} | lengths
    assert told["regions"] == regions
    # A drafter's runs are forwards of their own.
    assert told["compared"] * len(regions) == told["forwards"]
    stores = told["stores"]
    assert stores["trouble"] == []
    assert stores["same"]
    assert stores["noted"] > 10
    assert stores["found"] == [["BYTES", "POST_FORWARD", 1, "v", stores["position"]]]
    assert told["exchanged"] == [["WRITE_INPUT", "a"], ["WRITE_INPUT", "b"]]
    looked = [["same", layer, False] for layer in range(2)]
    assert told["recomputed"] == ({"looked": looked, "trouble": []} if regions == ["full"] else None)
    assert told["states"] == ([["BYTES", 0, "conv", "first"]] if "state" in regions else [])


@pytest.mark.takes_turns("states of test_states, in one process")
@pytest.mark.parametrize("feature", ["gdn"])
def test_what_wants_a_process_of_its_own_is_guarded(tmp_path, feature):
    """Gated delta nets of a mixture of experts: silent, answers as without Canary, every flip in a state named, and
    every fault that states can have."""
    environment = {**os.environ, "OUT": str(tmp_path), "GUARD_POKES": "4"}
    run = subprocess.run(
        [sys.executable, str(HERE / "gpu" / "guard.py"), feature, "--device", "cpu"],
        capture_output=True, text=True, env=environment, timeout=560, check=False,
    )  # fmt: skip
    told = json.loads((tmp_path / f"guard-{feature}.json").read_text())
    assert told["ok"], (told, run.stdout[-2000:])
    assert told["flips"] == "4/4"
    # The fifth needs a state that is kept and of no running request, which depends on how vLLM schedules.
    assert told["faults"] in ("4/4", "5/5")


def test_two_ranks_are_guarded_through_the_entry_point(tmp_path):
    """Tensor parallelism, started by ``CANARY_PLUGINS`` alone: the scheduler's events reach both workers, which are
    silent, answer as without Canary, and both name each flip, as their metrics say, too."""
    shared = tmp_path / "metrics"
    shared.mkdir()
    environment = {**os.environ, "OUT": str(tmp_path), "GUARD_POKES": "3", "PROMETHEUS_MULTIPROC_DIR": str(shared)}
    run = subprocess.run(
        [sys.executable, str(HERE / "gpu" / "guard.py"), "tp2", "--device", "cpu"],
        capture_output=True, text=True, env=environment, timeout=560, check=False,
    )  # fmt: skip
    told = json.loads((tmp_path / "guard-tp2.json").read_text())
    assert told["ok"], (told, run.stdout[-2000:])
    assert len(told["forwards"]) == 2
    assert told["flips"] == "3/3"
    assert told["faults"] == "8/8"
    # What vLLM's own endpoint gives out is read from these files: the flips, and the five faults that change bytes.
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(shared))
    for rank in "01":
        # The label "model" is the name that vLLM serves it under, here the folder's.
        labels = {"kind": "bytes", "region": "full", "rank": rank, "replica": "0"}.items()
        samples = [s for family in registry.collect() for s in family.samples if labels <= s.labels.items()]
        assert [s.value for s in samples if s.name == "kv_canary_incidents_total"] == [3 + 5]


@pytest.mark.beyond_ci("two ranks; a lost write of one engine; lost writes that look alike in the core's tests")
def test_a_lost_write_is_told_by_both_ranks_wherever_the_embedding_is(monkeypatch):
    """Tensor parallelism: a write is lost whose token's row of the embedding is on one rank, and that of the token that
    it had before on the other. Where both rows are bit-identical, each rank dismisses what looks like 30 lost writes in
    K and V of two layers."""
    monkeypatch.setenv("CANARY_READ_CHECK", "-1")
    told = told_by("ranks_script", plugins="vllm", CANARY_INCIDENT_TOKENS="true")
    quiet = {"found": [], "named": None}
    assert told["clean"] == [{**quiet, "dismissed": 0}] * 2
    assert told["alike"] == [{**quiet, "dismissed": 30 * 4}] * 2
    for name in ("lost", "lost back"):
        first, second = told[name]
        assert first == second
        assert first["named"] == [True]
        assert len(first["found"]) == 30
        assert all(kind == "LOST_WRITE" and (old < 256) != (new < 256) for kind, old, new in first["found"])
