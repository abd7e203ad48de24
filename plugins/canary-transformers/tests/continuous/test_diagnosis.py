"""Each class of bug, done to running continuous batching from outside, is diagnosed as what it is."""

import pytest
from support.injuries import INJURIES, hurt
from tiny.batching import HAS_POOL
from tiny.patient import CANNOT, ContinuousPatient

pytestmark = [
    pytest.mark.skipif(not HAS_POOL, reason="Transformers 5.17 has no pool that could be followed"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.takes_turns("other injuries, and canary-sglang's test of the same name")
@pytest.mark.parametrize("name", [name for name in INJURIES if name not in CANNOT])
def test_the_first_diagnosis_is_right(name):
    """Of the one incident that it is."""
    patient = ContinuousPatient()
    try:
        told = hurt(patient, name, seed=1)
    finally:
        patient.close()
    assert told["first"] in told["right"], told
    assert told["incidents"] == 1, told
