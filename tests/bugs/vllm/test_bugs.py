"""Every bug of vLLM is found as its file declares, or missed as it declares."""

import pytest
from bugs import museum
from bugs.stages.vllm import Bugs

BUGS = {name: museum.bug("vllm", name) for name in museum.names("vllm")}


@pytest.fixture(scope="module")
def bugs():
    """The process in which they run."""
    process = Bugs()
    yield process
    process.close()


@pytest.mark.timeout(600)
@pytest.mark.takes_turns("other bugs, and faults in canary-vllm's test_engine")
@pytest.mark.xdist_group("museum")
@pytest.mark.parametrize("profile", museum.PROFILES)
@pytest.mark.parametrize("name", sorted(BUGS, key=lambda name: BUGS[name].setup))
def test_the_bug_is_found_as_declared(bugs, name, profile):
    """The clean traffic raises nothing, the broken function runs, and the first finding is the one that is declared;
    a bug that is declared as missed raises nothing."""
    from vllm_on_cpu.setups import lacking

    if (reason := lacking(BUGS[name].setup)) is not None:
        pytest.skip(reason)
    outcome = bugs.outcome(name, profile)
    assert not museum.problem(BUGS[name].expected(profile), outcome), outcome
