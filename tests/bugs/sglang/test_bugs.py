"""Every bug of SGLang is found as its file declares, or missed as it declares."""

import pytest
from bugs import museum
from bugs.stages.sglang_setups import SETUPS, guarded

BESIDE = pytest.mark.takes_turns("other bugs, and all faults in canary-sglang's test_engine")
BUGS = {name: museum.bug("sglang", name) for name in museum.names("sglang")}


def cases():
    """By setup, so that a worker starts each engine once."""
    for name in sorted(BUGS, key=lambda name: [*SETUPS].index(BUGS[name].setup)):
        bug = BUGS[name]
        for profile in museum.PROFILES:
            marks = [pytest.mark.xdist_group(f"museum {bug.setup}"), BESIDE]
            if bug.slow:
                marks.append(pytest.mark.beyond_ci("the bugs of other setups"))
            elif profile == "thorough" and bug.thorough is None:
                marks.append(pytest.mark.beyond_ci("the same with default settings, of which the same is expected"))
            yield pytest.param(name, profile, marks=marks, id=f"{name}-{profile}")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One engine for each setup and profile; of which each bug gets a fork."""
    engines = {}

    def of(setup, profile):
        if (setup, profile) not in engines:
            while engines:
                # A worker is done with a setup when it gets to the next one.
                if next(iter(engines))[0] == setup:
                    break
                engines.pop(next(iter(engines))).close()
            folder = tmp_path_factory.mktemp(f"{setup}-{profile}")
            engines[setup, profile] = guarded(setup, profile, folder)
        return engines[setup, profile]

    yield of
    for process in engines.values():
        process.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "profile"), list(cases()))
def test_the_bug_is_found_as_declared(engine, name, profile):
    """The clean traffic raises nothing, the broken function runs, and the first finding is the one that is declared;
    a bug that is declared as missed raises nothing."""
    bug = BUGS[name]
    outcome = engine(bug.setup, profile).exhibit(name=name)
    assert not museum.problem(bug.expected(profile), outcome), outcome
