"""Real SGLang, unmodified, misused or wrong by its own API: found, with a clean twin that is silent."""

import pytest
from bugs import museum

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.beyond_ci("those of Transformers, and the mechanisms beside this folder"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(museum.installed("sglang") is None, reason="SGLang is not installed; make test-sglang has it"),
]
LIVE = {name: museum.bug("sglang", f"live.{name}") for name in museum.names("live") if name.startswith("sglang_")}


@pytest.mark.parametrize("profile", museum.PROFILES)
@pytest.mark.parametrize("name", LIVE)
def test_the_bug_is_found_as_declared(name, profile, tmp_path):
    """The twin that does it right raises nothing; then the first finding is the one that is declared."""
    from bugs.stages.sglang_setups import guarded

    if reason := museum.elsewhere("sglang", LIVE[name]):
        pytest.skip(reason)
    process = guarded(LIVE[name].setup, profile, tmp_path)
    try:
        outcome = process.exhibit(name=f"live.{name}")
    finally:
        process.close()
    assert not museum.problem(LIVE[name].expected(profile), outcome), outcome
