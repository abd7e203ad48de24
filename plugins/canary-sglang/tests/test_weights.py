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


def test_a_flipped_bit_of_a_parameter_is_named(launch):
    """With ``CANARY_WEIGHTS``: by name, element, old and new value, once. SGLang's own updates are no alarm, and
    neither is what is written past torch's counters."""
    served = launch({}, CANARY_WEIGHTS="on", CANARY_READ_CHECK="0")
    prompts = [[*SHARED, number + 5] for number in range(3)]
    served.serve(prompts=prompts, new_tokens=6)
    done = served.serve_through_updates(prompts=[[9, *prompt] for prompt in prompts], retract=True)
    served.serve(prompts=[[10, *prompt] for prompt in prompts], new_tokens=6)
    served.update_past_torch()
    served.serve(prompts=[[11, *prompt] for prompt in prompts], new_tokens=6)
    clean = served.findings()
    assert [v for v in (*done.get("violations", ()), *clean["violations"]) if v["kind"] == "weights"] == []
    assert clean["stats"]["weights_unsure"] >= 1
    assert clean["stats"]["weights_renewed"] > 0
    flipped = served.flip_a_weight(element=1234, bit=11)
    served.serve(prompts=[[12, *prompt] for prompt in prompts], new_tokens=6)
    served.serve(prompts=[[13, *prompt] for prompt in prompts], new_tokens=6)
    (found,) = [v for v in served.findings()["violations"] if v["kind"] == "weights"]
    assert (found["source"].split(" (")[0], found["element"]) == (flipped["name"], 1234)
    assert found["old"].endswith(flipped["old"])
    assert found["new"].endswith(flipped["new"])
