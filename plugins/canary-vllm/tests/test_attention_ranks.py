"""One layer's attention is computed once more by each of two tensor-parallel ranks, which have half of the heads."""

import pytest
from vllm_on_cpu.attention_ranks_script import BROKEN, LAYER
from vllm_on_cpu.scripts import told_by

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("processes")]
SETTINGS = {"CANARY_RECOMPUTE": "100%", "CANARY_READ_CHECK": "0", "CANARY_SCRUB_BUDGET": "0", "CANARY_BYTES": "off"}
BESIDE = pytest.mark.takes_turns(
    "attention of one process in test_attention; two ranks in test_agree and test_processes"
)
BEYOND = pytest.mark.beyond_ci("the same of another type of model")


@BESIDE
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(["llama"], id="llama"),
        pytest.param(["gpt_oss"], id="sinks", marks=BEYOND),
        pytest.param(["llama", "num_key_value_heads=1"], id="one KV head", marks=BEYOND),
    ],
)
def test_each_rank_judges_its_own_heads(model):
    """Clean ranks are never blamed. Then rank 1 scales wrongly in one layer: it says so, of that layer, and rank 0 says
    nothing of attention. Answers before are those without Canary."""
    clean, scaled = told_by("attention_ranks_script", *model, plugins="vllm", **SETTINGS)["phases"]
    plain = told_by("attention_ranks_script", *model)["phases"][0]
    assert clean["tokens"] == plain["tokens"]
    assert [rank["found"] for rank in clean["ranks"]] == [[], []]
    assert [rank["stats"]["attention_looks"] >= 3 for rank in clean["ranks"]] == [True, True]
    assert [rank["stats"].get("attention_unjudged", 0) for rank in scaled["ranks"]] == [0, 0]
    told = [{(v["layer"], v["rule"]) for v in rank["found"] if v["kind"] == "attention"} for rank in scaled["ranks"]]
    assert told[BROKEN] == {(LAYER, "scale")}
    assert told[1 - BROKEN] == set()
