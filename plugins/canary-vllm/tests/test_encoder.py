"""K and V of an encoder's states: Whisper."""

from functools import cache

import pytest
from vllm_on_cpu.scripts import told_by

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("processes")]


@cache
def told(runner):
    """What the script says."""
    said = told_by("encoder_script", *(["v2"] if runner == "v2" else []))
    assert said["v2"] is (runner == "v2")
    return said


BESIDE = "engines without an encoder"


@pytest.fixture(
    params=[
        pytest.param("v1", marks=[pytest.mark.older_release, pytest.mark.takes_turns(BESIDE, unit="encoder v1")]),
        pytest.param("v2", marks=pytest.mark.takes_turns(BESIDE, unit="encoder v2")),
    ]
)
def said(request):
    """With vLLM's older model runner, and with the one that it takes on a GPU."""
    return told(request.param)


def test_clean_traffic_is_silent_and_answers_stay_the_same(said):
    """Requests whose blocks held tokens before, or states: no finding, every byte that forwards change is claimed, and
    both halves are guarded."""
    assert said["trouble"] == []
    assert said["same"]
    assert said["answers"] > 15
    assert said["unclaimed"] == 0
    assert said["coverage"] == 1.0
    assert set(said["regions"]) == {"cross", "full"}


def test_a_flipped_bit_is_told_with_layer_half_and_state(said):
    """Of each layer and half, with the request."""
    assert said["found"] == said["poked"] != []
    assert said["flipped"] == ["cross"]


def test_another_inputs_states_are_told(said):
    """Two requests whose rows of the block table have changed places: each is told what it reads, and no other region
    is blamed."""
    assert said["clean"] == []
    assert said["exchanged"] == [["PREFIX", "cross", request] for request in said["asked"]]
    assert "the encoder's states #" in said["said"]
    assert "cross-attention reads K and V of another input" in said["said"]
