"""Two tensor-parallel ranks of vLLM's own, in processes of their own, of which rank 1 computes something else."""

from typing import Any

import pytest
from vllm_on_cpu.scripts import told_by

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("processes")]


def phases(tmp_path: Any, model: str, dtype: str, *names: str, interval: int = 1) -> list[dict[str, Any]]:
    """What came of each phase of `agree_script`."""
    own = {"CANARY_RANKS_INTERVAL": str(interval), "CANARY_CONTROL_DIR": str(tmp_path / "control")}
    served: list[dict[str, Any]] = told_by("agree_script", model, dtype, *names, plugins="vllm", **own)["phases"]
    return served


def found(phase: dict[str, Any]) -> list[list[tuple[object, ...]]]:
    """Findings about ranks by rank: what differs, in which source."""
    return [[(v["rule"], v.get("source")) for v in rank["found"] if v["kind"] == "ranks"] for rank in phase["ranks"]]


def events(phase: dict[str, Any]) -> list[list[str]]:
    """Names of what else was told about ranks, by rank."""
    return [[e["event"] for e in rank["events"] if e["event"].startswith("ranks_")] for rank in phase["ranks"]]


def test_a_rank_that_computes_something_else_is_found(tmp_path):
    """A model with one KV head, which both ranks hold, and sampling with a temperature: clean traffic is silent, and
    each forward is compared, with sampled tokens and KV, which are bit-equal. Then rank 1 is given another token,
    samples another one, and has a bit of its KV flipped before the end of the forward: one finding each, in that
    forward. Answers are those without a comparison. A rank that writes nothing any more is told, without a finding."""
    names = ("clean", "tokens", "clean", "sampled", "clean", "kv", "clean", "absent")
    served = phases(tmp_path, "llama_1_head", "float32", *names)
    expected = {"tokens": ("tokens", None), "sampled": ("sampled", None), "kv": ("kv", "k.1")}
    assert [found(phase) for phase in served] == [[[expected[name]] if name in expected else [], []] for name in names]
    begun = 0
    for phase in served:
        first, second = phase["ranks"]
        for one in first["found"]:
            if one["kind"] == "ranks":
                # Prompts of both requests take one forward, so the fault is in the 25th.
                assert one["step"] == begun + 25
                assert "rank 0 (" in one["explanation"]
                assert "rank 1 (" in one["explanation"]
        begun = first["forwards"]
        assert phase["phase"] == "absent" or second["forwards"] == begun
    assert events(served[0]) == [["ranks_compared"], []]
    assert events(served[-1]) == [["ranks_blind"], []]
    counts = served[6]["ranks"][0]["counts"]
    assert counts["ranks_compared"] >= served[6]["ranks"][0]["forwards"] - 2
    assert counts["ranks_compared_samples"] == counts["ranks_compared"]
    assert counts["ranks_compared_kv"] == counts["ranks_compared"] - counts["ranks_differing"] + 1
    assert not {"ranks_missed", "ranks_unsure", "ranks_left_out"} & counts.keys()
    (plain,) = phases(tmp_path, "llama_1_head", "float32", "clean", interval=0)
    assert plain["tokens"] == served[0]["tokens"]
    assert [rank["counts"] for rank in plain["ranks"]] == [{}, {}]


@pytest.mark.beyond_ci("the same of latents")
def test_latents_of_two_ranks_are_bit_equal_and_compared(tmp_path):
    """MLA in bfloat16: both ranks hold all latents. A flipped bit of rank 1's is found in its layer."""
    served = phases(tmp_path, "deepseek", "bfloat16", "clean", "kv", "clean")
    assert [found(phase) for phase in served] == [[[], []], [[("kv", "kv.1")], []], [[], []]]
    counts = served[-1]["ranks"][0]["counts"]
    assert counts["ranks_compared_kv"] == counts["ranks_compared"] > 80
