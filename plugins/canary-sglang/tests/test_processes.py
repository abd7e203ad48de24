"""SGLang as users start it: several processes, the overlap scheduler, settings from the environment only."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from engines import command, python_path, run_to_end

pytestmark = [pytest.mark.timeout(900), pytest.mark.first]


def serve(folder: Path, device: str = "cpu", **settings: str) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Outputs, and Canary's events on stderr."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_") and k != "TRITON_INTERPRET"}
    known = {"PYTHONPATH": python_path(), "CANARY_LOG_FORMAT": "json", "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    done = run_to_end(
        command("user_script", str(folder / "model"), device), log, {**inherited, **settings, **known}, 600
    )
    lines = log.read_text(errors="replace").splitlines()
    outputs = [json.loads(line.removeprefix("OUTPUTS ")) for line in lines if line.startswith("OUTPUTS ")]
    assert done == 0, "\n".join(lines[-40:])
    events = [json.loads(line[line.index("{") :]) for line in lines if '"logger": "canary"' in line]
    return outputs[0], events


@pytest.mark.older_release
@pytest.mark.beyond_ci("the same with an older SGLang, and two ranks with this one")
def test_overlap_in_several_processes(tmp_path):
    """The scheduler's process guards itself; clean traffic under the overlap scheduler, two rounds of it, raises
    nothing and computes what it computes unguarded; then a fault from the environment is found."""
    plain, silent = serve(tmp_path)
    assert silent == []
    guard = {"CANARY_PLUGINS": "sglang", "CANARY_STATS_INTERVAL": "10", "CANARY_SCRUB_BUDGET": "8MiB"}
    outputs, events = serve(tmp_path, **guard, CANARY_FAULTS="real_kv_unused_cache:warmup=95,source=v.1")
    names = [event["event"] for event in events]
    injected = [event for event in events if event["event"] == "fault_injected"]
    found = [event for event in events if event["event"] == "incident"]
    assert outputs[:20] == plain[:20]
    assert names.count("attached") == 1
    assert {"disabled", "silence"}.isdisjoint(names)
    assert [e["checked_forwards"] > 95 for e in events if e["event"] == "stats"][-1]
    assert len(injected) == 1
    assert "incident" not in names[: names.index("fault_injected")]
    assert [(v["kind"], v["layer"], v["half"], v["slot"]) for v in found] == [("bytes", 1, "v", injected[0]["slot"])]


@pytest.mark.beyond_ci("where a process stands, without an engine; replicas of data-parallel attention")
def test_replicas_of_an_engine_name_themselves(tmp_path):
    """``--dp-size 2``: two schedulers, each with a group of processes of its own, so both are rank 0. Every event says
    of which replica it is, and of the model by the name that is served; the witness of each knows its own tokens."""
    cores = sorted(os.sched_getaffinity(0))
    guard = {
        "CANARY_PLUGINS": "sglang",
        "CANARY_STATS_INTERVAL": "10",
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
    }
    outputs, events = serve(tmp_path, json.dumps({"dp_size": 2, "served_model_name": "tiny"}), **guard)
    assert len(outputs) == 30
    for name in ("attached", "coverage", "stats"):
        told = [e for e in events if e["event"] == name]
        assert {(e["replica"], e["rank"], e["model"]) for e in told} == {(0, 0, "tiny"), (1, 0, "tiny")}
    names = {event["event"] for event in events}
    assert names.isdisjoint({"disabled", "silence", "incident", "unguarded_tokens", "workers_unguarded"})
    assert all(e["computed_tokens"] > 0 for e in events if e["event"] == "stats")


@pytest.mark.gpu
def test_overlap_with_cuda_graphs(tmp_path):
    """The same on a GPU, where the host runs ahead of replayed graphs: the first thirty forwards are clean and compute
    what they do unguarded; then a fault from the environment is found."""
    plain, silent = serve(tmp_path, "cuda")
    assert silent == []
    guard = {"CANARY_PLUGINS": "sglang", "CANARY_STATS_INTERVAL": "10", "CANARY_SCRUB_BUDGET": "64MiB"}
    outputs, events = serve(tmp_path, "cuda", **guard, CANARY_FAULTS="real_kv_unused_cache:warmup=30,source=v.3")
    names = [event["event"] for event in events]
    injected = [event for event in events if event["event"] == "fault_injected"]
    found = [event for event in events if event["event"] == "incident"]
    assert {"disabled", "silence"}.isdisjoint(names)
    assert outputs[:10] == plain[:10]
    assert len(injected) == 1
    assert [(v["kind"], v["layer"], v["half"], v["slot"]) for v in found] == [("bytes", 3, "v", injected[0]["slot"])]
