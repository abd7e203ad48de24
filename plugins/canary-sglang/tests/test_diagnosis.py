"""Each class of bug, done to a running SGLang from outside, is diagnosed as what it is."""

import pytest
from support.injuries import INJURIES
from tools.injured import CANNOT

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("diagnosis")]


@pytest.fixture(scope="module")
def injured(launch):
    """One engine for all of them. However many incidents there are, each is told and looked at."""
    return launch({}, like="mha", CANARY_INCIDENT_LIMIT="0")


COVERED = pytest.mark.beyond_ci(
    "the same injury on Transformers, and docs/confusion.json: each takes an engine of its own"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[COVERED] if injury.alone else [])
        for name, injury in INJURIES.items()
        if name not in CANNOT
    ],
)
def test_the_first_diagnosis_is_right(injured, launch, name):
    """Of the one incident that it is. Where the engine's books are wrong afterwards, it gets an engine of its own."""
    alone = INJURIES[name].alone
    engine = launch({}, like="mha", CANARY_INCIDENT_LIMIT="0") if alone else injured
    told = engine.injure(name=name, seed=1, last=alone)
    if alone:
        engine.close()
    assert told["first"] in told["right"], told
    assert told["incidents"] == 1, told
