"""K and V of an encoder's states: Whisper."""

from functools import cache

import pytest
from vllm_on_cpu.scripts import told_by

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("processes"), pytest.mark.older_release]


@cache
def told():
    """What the script says."""
    return told_by("encoder_script")


def test_clean_traffic_is_silent_and_answers_stay_the_same():
    """Requests whose blocks held tokens before, or states: no finding, every byte that forwards change is claimed, and
    both halves are guarded."""
    said = told()
    assert said["trouble"] == []
    assert said["same"]
    assert said["answers"] > 15
    assert said["unclaimed"] == 0
    assert said["coverage"] == 1.0
    assert set(said["regions"]) == {"cross", "full"}


def test_a_flipped_bit_is_told_with_layer_half_and_state():
    """Of each layer and half, with the request."""
    said = told()
    assert said["found"] == said["poked"] != []
    assert said["flipped"] == ["cross"]


def test_another_inputs_states_are_told():
    """Two requests whose rows of the block table have changed places: each is told what it reads, and no other region
    is blamed."""
    said = told()
    assert said["clean"] == []
    assert said["exchanged"] == [["PREFIX", "cross", request] for request in said["asked"]]
    assert "the encoder's states #" in said["said"]
    assert "cross-attention reads K and V of another input" in said["said"]
