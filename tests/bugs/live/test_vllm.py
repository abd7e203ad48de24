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

ANSWERED_WRONGLY = (
    "vllm_rejected_load_computed_again",
    "vllm_lmcache_leaves_the_adapter_out",
    "vllm_lmcache_leaves_the_embeddings_out",
    "vllm_lmcache_kept_when_it_is_reset",
)
"""Those of which requests, weights and adapters are the same in the clean traffic and in the other."""


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


@pytest.mark.parametrize("name", ANSWERED_WRONGLY)
def test_the_answer_is_wrong(bugs, name):
    """Bob asks the same of an engine that does it right, and is answered otherwise; Alice, who came before, is not."""
    if reason := museum.elsewhere("vllm", LIVE[name]):
        pytest.skip(reason)
    wrong, right = (bugs.outcome(f"live.{name}", "default", sound=sound)["answers"] for sound in (False, True))
    assert wrong["bob"] != right["bob"]
    assert wrong["alice"] == right["alice"]
