"""Real vLLM, unmodified, misused or wrong by its own API: found, with a clean twin that is silent."""

import pytest
from bugs import museum

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.beyond_ci("those of Transformers, and the mechanisms beside this folder"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(museum.installed("vllm") is None, reason="vLLM is not installed; make test-vllm has it"),
]
LIVE = {name: museum.bug("vllm", f"live.{name}") for name in museum.names("live") if name.startswith("vllm_")}


@pytest.fixture(scope="module")
def bugs():
    """The process in which they run."""
    from bugs.stages.vllm import Bugs

    process = Bugs()
    yield process
    process.close()


@pytest.mark.parametrize("profile", museum.PROFILES)
@pytest.mark.parametrize("name", LIVE)
def test_the_bug_is_found_as_declared(bugs, name, profile):
    """The twin that does it right raises nothing; then the first finding is the one that is declared."""
    if reason := museum.elsewhere("vllm", LIVE[name]):
        pytest.skip(reason)
    outcome = bugs.outcome(f"live.{name}", profile)
    assert not museum.problem(LIVE[name].expected(profile), outcome), outcome
