"""Real SGLang, and requests that are not what others are: nothing is found, and Canary stays on."""

import pytest

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def served(launch):
    """An engine of which all bytes that are read are compared."""
    return launch({}, CANARY_READ_CHECK="-1")


def quiet(done):
    """Nothing was found, and nothing switched Canary off."""
    return done["violations"] == [] and done["on"]


def test_embeddings_of_a_prompt_that_was_text_before_lose_no_write(served):
    """SGLang has a number in the place of each token, and what is written are the bytes that are there already."""
    done = served.serve_embeddings(prompt=list(range(5, 25)))
    assert quiet(done)
    assert done["answers"]["text"] == done["answers"]["given"] == done["answers"]["again"]


def test_two_requests_of_one_name_are_not_taken_for_each_other(served):
    """A gateway that sends a request twice makes them."""
    assert quiet(served.serve_twins(prompts=[list(range(30, 50)), list(range(60, 85))]))


def test_beams_switch_nothing_off(served):
    """Their rows have no request of their own: such forwards are not checked, and what they write is not judged. That
    is told."""
    done = served.serve_beams(prompt=list(range(90, 110)), other=list(range(120, 140)))
    if not done:
        pytest.skip("this SGLang has no beams")
    assert quiet(done)
    assert len(done["answers"]["other"]) == 12
    told = [e for e in served.events() if e["name"] == "unguarded_forward"]
    assert [e["mode"] for e in told] == ["BEAMS"]
