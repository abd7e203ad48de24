"""Two tensor-parallel ranks, each a process of SGLang's own: one of them is corrupted, both act."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.first]

HERE = Path(__file__).parent
R = random.Random(0)
SHARED = [R.randrange(3, 250) for _ in range(30)]
TRAFFIC = [SHARED[: R.randrange(12, 30)] + [R.randrange(3, 250) for _ in range(10)] for _ in range(12)]
OTHERS = [[R.randrange(3, 250) for _ in range(20)] for _ in range(2)]


def phase(control: str, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Requests that are sent together, and what rank 1 suffers meanwhile."""
    return {"control": control, "prompts": prompts, "new_tokens": new_tokens}


def serve(folder: Path, options: dict[str, Any], phases: list[dict[str, Any]], **settings: str) -> list[Any]:
    """What came of each phase; the engine in a process group of its own, since one that is killed takes its parent
    along."""
    folder.mkdir()
    info = folder / "ranks_witness-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: ranks-witness\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text("[canary]\nranks_witness = ranks_witness\n")
    folder.joinpath("phases.json").write_text(json.dumps(phases))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CANARY_") and k != "TRITON_INTERPRET"}
    cores = sorted(os.sched_getaffinity(0))
    known = {
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), os.environ.get("PYTHONPATH", "")]),
        "RANKS_FOLDER": str(folder),
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "OMP_NUM_THREADS": "1",
    }
    log = folder / "log"
    with log.open("w") as out:
        done = subprocess.run(
            [sys.executable, str(HERE / "ranks_script.py"), str(folder), json.dumps(options)],
            stdout=out,
            stderr=out,
            env={**inherited, **known, **settings},
            timeout=800,
            start_new_session=True,
            check=False,
        )
    lines = log.read_text(errors="replace").splitlines()
    assert done.returncode == 0, "\n".join(lines[-40:])
    return [json.loads(line.removeprefix("PHASE ")) for line in lines if line.startswith("PHASE ")]


def told(folder: Path, rank: int, key: str) -> list[Any]:
    """What a rank wrote down under ``key``: values of ``forward`` and ``violation``, events whole."""
    lines = [json.loads(line) for line in folder.joinpath(f"rank{rank}.jsonl").read_text().splitlines()]
    return [line if key in ("event", "broken") else line[key] for line in lines if key in line]


def test_one_rank_is_corrupted_and_both_act(tmp_path):
    """Clean traffic raises nothing on either rank. Then rank 1's part of an idle cached token breaks, and later that of
    a running request: only rank 1 finds it and says so; both ranks evict the same tokens and abort the same request, in
    the same turn; the client of that may try again. They go on with the same batches, and all that is served is what an
    unguarded engine serves."""
    phases = [
        phase("nothing", TRAFFIC, 12),
        phase("1 cached", OTHERS[:1], 60),
        phase("nothing", TRAFFIC, 12),
        phase("2 running", OTHERS, 60),
        phase("nothing", TRAFFIC, 12),
    ]
    options = {"tp_size": 2}
    plain = serve(tmp_path / "plain", options, [{**p, "control": "nothing"} for p in phases])
    folder = tmp_path / "guarded"
    guarded = serve(
        folder,
        options,
        phases,
        CANARY_PLUGINS="sglang,ranks_witness",
        CANARY_ON_VIOLATION="quarantine",
        CANARY_SCRUB_BUDGET="8MiB",
    )
    tokens = [[request["tokens"] for request in done] for done in guarded]
    expected = [[request["tokens"] for request in done] for done in plain]
    assert [tokens[n] for n in (0, 2, 4)] == [expected[n] for n in (0, 2, 4)]

    cached, running = told(folder, 1, "broken")
    assert told(folder, 0, "violation") == []
    found = [(v["kind"], v["layer"], v["half"], v["slot"], v["rank"]) for v in told(folder, 1, "violation")]
    assert found == [("bytes", 1, "v", cached["slot"], 1), ("bytes", 1, "v", running["slot"], 1)]
    assert sorted(request["status"] for request in guarded[3]) == [200, 503]
    (kept,) = [n for n, request in enumerate(guarded[3]) if request["status"] == 200]
    assert tokens[3][kept] == expected[3][kept]

    acts = [[e for e in told(folder, rank, "event") if e["event"] in ("quarantined", "aborted")] for rank in (0, 1)]
    assert [[e.pop("rank") for e in events] for events in acts] == [[rank] * len(acts[0]) for rank in (0, 1)]
    assert acts[0] == acts[1]
    assert [(e["event"], e["slot"]) for e in acts[0]][:2] == [
        ("quarantined", cached["slot"]),
        ("aborted", running["slot"]),
    ]
    assert acts[0][1]["request"] == running["request"]
    assert told(folder, 0, "forward") == told(folder, 1, "forward")
    names = {e["event"] for rank in (0, 1) for e in told(folder, rank, "event")}
    assert names.isdisjoint({"disabled", "quarantine_failed", "reporting_failed", "silence"})
