"""Real Transformers, unmodified, misused or wrong by its own API: found, with a clean twin that is silent."""

import pytest
from bugs import museum

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        museum.installed("transformers") is None, reason="Transformers is not installed; make test has it"
    ),
]
LIVE = {
    name: museum.bug("transformers", f"live.{name}")
    for name in museum.names("live")
    if name.startswith("transformers_")
}


@pytest.mark.parametrize("profile", museum.PROFILES)
@pytest.mark.parametrize("name", LIVE)
def test_the_bug_is_found_as_declared(name, profile):
    """The twin that does it right raises nothing; then the first finding is the one that is declared."""
    from bugs.stages import transformers

    bug = LIVE[name]
    if reason := museum.elsewhere("transformers", bug):
        pytest.skip(reason)
    with transformers.stage(bug.setup, profile) as stage:
        outcome = museum.run(bug, stage)
    assert not museum.problem(bug.expected(profile), outcome), outcome
