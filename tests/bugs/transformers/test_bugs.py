"""Every bug of Transformers is found as its file declares, or missed as it declares."""

import pytest
from bugs import museum

BUGS = {name: museum.bug("transformers", name) for name in museum.names("transformers")}


@pytest.mark.takes_turns("other bugs, and faults of sessions and caches in canary-transformers' tests")
@pytest.mark.parametrize("profile", museum.PROFILES)
@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_found_as_declared(name, profile):
    """The clean traffic raises nothing, the broken function runs, and the first finding is the one that is declared;
    a bug that is declared as missed raises nothing."""
    from bugs.stages import transformers

    bug = BUGS[name]
    with transformers.stage(bug.setup, profile) as stage:
        outcome = museum.run(bug, stage)
    assert not museum.problem(bug.expected(profile), outcome), outcome
