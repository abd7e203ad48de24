"""Two tensor-parallel ranks of SGLang's own, in processes of their own, of which rank 1 computes something else."""

import random
from pathlib import Path
from typing import Any

import pytest
from engines.ranks import phase, serve, told

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.first,
    pytest.mark.takes_turns("canary-vllm's test of the same name"),
]

R = random.Random("agree")
NEW = 12


def prompts(count: int = 2) -> list[list[int]]:
    """New ones, so that none goes on with what a rank has sampled alone."""
    return [[R.randrange(3, 250) for _ in range(R.randrange(9, 20))] for _ in range(count)]


def served(folder: Path, names: tuple[str, ...], **settings: str) -> list[Any]:
    """What came of the phases ``names``, see `tools.rank_differences`, with MLA in float32."""
    options: dict[str, Any] = dict(tp_size=2, model="deepseek_v2", dtype="float32", attention_backend="triton")
    phases = [phase(name, prompts(), NEW) for name in names]
    guard = {"CANARY_PLUGINS": "sglang,ranks_witness", "CANARY_STATS_INTERVAL": "4", **settings}
    interpreted = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    return serve(folder, options, phases, ["differs = tools.rank_differences:install"], **guard, **interpreted)


def test_a_rank_that_computes_something_else_is_found(tmp_path):
    """Both ranks hold all latents, and clean traffic is silent, while each forward is compared, with sampled tokens and
    KV, which are bit-equal. Then rank 1 samples another token, has a bit of its KV flipped before the end of the
    forward, and has another weight for a while: one finding each, which names both, since of two nobody can say which
    is wrong."""
    names = ("nothing", "sampled", "nothing", "kv", "nothing", "weight", "nothing")
    folder, control = tmp_path / "e", tmp_path / "control"
    done = served(folder, names, CANARY_RANKS_INTERVAL="1", CANARY_CONTROL_DIR=str(control))
    assert {request["status"] for phase in done for request in phase} == {200}
    found = told(folder, 0, "violation")
    rules = [("sampled", None), ("kv", "kv.1"), ("kv", "kv.1")]
    assert [(v["kind"], v["rule"], v.get("source")) for v in found] == [("ranks", *rule) for rule in rules]
    assert all(f"rank {rank} (" in v["explanation"] for v in found for rank in (0, 1))
    assert told(folder, 1, "violation") == []
    events = [e["event"] for rank in (0, 1) for e in told(folder, rank, "event") if e["event"].startswith("ranks_")]
    assert events == ["ranks_compared"]
    counts, forwards = told(folder, 0, "compared")[-1], len(told(folder, 0, "forward"))
    assert counts["ranks_compared"] >= forwards - 8
    assert counts["ranks_compared_samples"] == counts["ranks_compared"]
    assert counts["ranks_compared_kv"] > forwards // 2
    assert not {"ranks_missed", "ranks_unsure"} & counts.keys()
