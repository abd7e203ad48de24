"""Real SGLang, and weights that are updated under running requests: what these go on with is no finding. A prefix cache
that is kept for later ones is: tests/bugs/live."""

import pytest

pytestmark = pytest.mark.timeout(900)
SHARED = [(11 * i) % 200 + 3 for i in range(40)]


@pytest.fixture(scope="module")
def served(launch):
    """An engine with the prefix cache."""
    return launch({})


@pytest.mark.parametrize("retract", [True, False])
def test_running_requests_are_never_blamed(served, retract):
    """Also where they are computed again and hit what another one has computed anew."""
    prompts = [[*SHARED, 7 + retract, number + 5] for number in range(3)]
    done = served.serve_through_updates(prompts=prompts, retract=retract)
    if not done:
        pytest.skip("this SGLang can't pause")
    assert done["violations"] == []
    assert done["on"]
    assert done["changes"] == 2
