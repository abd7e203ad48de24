"""Layers of draft models: EAGLE's and EAGLE3's, multi-token prediction (GLM-4-MoE's), and a model of its own."""

import pytest
from vllm_on_cpu.scripts import told_by

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("processes")]
BESIDE = pytest.mark.takes_turns(
    "engines without drafts in test_engine, and regions of draft models in the core's tests"
)

COVERED_BY = "eagle or draft_model, in their turns: layers in the target's groups, and in groups of their own"


@BESIDE
@pytest.mark.parametrize(
    "method",
    [
        "eagle",
        pytest.param("eagle3", marks=pytest.mark.beyond_ci(COVERED_BY)),
        pytest.param("mtp", marks=pytest.mark.beyond_ci(COVERED_BY)),
        "draft_model",
    ],
)
def test_a_draft_models_layers_are_guarded(method):
    """Drafts that are accepted and rejected, chunked prefill, prefix hits, preemption, and requests that become too
    long to be drafted for: silent, answers as without Canary, every byte that a drafter writes is claimed, what the
    served model's layers store is there when its forward ends; bits that are flipped in each layer and half of the
    draft model are named. The served model's KV is computed again, and is well; the draft model's layers are said to be
    left out."""
    told = told_by("drafts_script", method)
    assert told["trouble"] == []
    assert told["same"]
    assert told["audit"] == 0
    assert told["coverage"] == 1.0
    assert told["regions"] == ["draft", "full"]
    # Heads with random weights guess next to nothing.
    assert method != "draft_model" or max(told["steps"]) > min(told["steps"]) == 1
    assert told["stores"] > 100
    assert told["found"] == told["poked"] != []
    assert told["flipped"] == ["draft"]
    # In 32-bit floats both ways are equal bit for bit.
    well = {"verdicts": ["same"] * 3, "found": 0, "compared": ["full"], "left_out": ["draft"]}
    assert told["again"] == well
