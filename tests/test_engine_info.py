"""`EngineInfo`: which versions of an engine are guarded, and what is said of the others."""

import pytest

from canary_core import EngineInfo, PluginError

BAD = {"==2.4.1": "its cache frees blocks twice", "~=3.7.0": "its runner has no forward"}


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.0", "tested"),
        ("2.9.9", "tested"),
        ("2.5rc1", "tested"),
        ("2.5.dev3+g12ab", "tested"),
        ("2.4+cu130", "tested"),
        ("1.9", "too_old"),
        ("2.0rc1", "too_old"),
        ("1!1.0", "newer"),
        ("3.0", "newer"),
        ("3.0rc1", "newer"),
        ("3.0.dev1+local", "newer"),
        ("3.0.post1", "newer"),
        ("2.4.1", "known_bad"),
        ("2.4.1+cu130", "known_bad"),
        ("3.7.2", "known_bad"),
        (None, "not_installed"),
    ],
)
def test_status(version, status, distribution):
    """Release candidates and local builds count as packaging has them: those of the upper bound are above it. What is
    known to be bad wins over the range. Only the tested ones count as supported."""
    if version:
        distribution("toy-engine", {}, version=version)
    engine = EngineInfo.of("toy-engine", ">=2,<3", BAD)
    assert (engine.version, engine.status, engine.supported) == (version, status, status == "tested")
    assert (engine.refusal("plugin", "canary-toy") is None) == (status in ("tested", "newer"))
    assert (engine.refusal("plugin", "canary-toy", "refuse") is None) == (status == "tested")


@pytest.mark.parametrize(
    ("tested", "version", "status"),
    [
        ("<=2.4", "2.5", "newer"),
        ("==2.4", "2.5", "newer"),
        ("==2.4", "2.3", "too_old"),
        ("==2.4.*", "2.5", "newer"),
        ("==2.4.*", "2.3.9", "too_old"),
        ("~=2.4", "3.0", "newer"),
        ("~=2.4", "2.3", "too_old"),
        (">2.4", "2.4", "too_old"),
        (">=2,<3,!=2.4", "2.4", "known_bad"),
        (">=2,<3,!=3.1", "3.1", "known_bad"),
        ("", "0.1", "tested"),
    ],
)
def test_above_and_below_every_sort_of_range(tested, version, status, distribution):
    """What a range leaves out with ``!=`` is refused, wherever it lies."""
    distribution("toy-engine", {}, version=version)
    assert EngineInfo.of("toy-engine", tested).status == status


@pytest.mark.parametrize(
    ("version", "untested", "parts"),
    [
        ("2.4.1", "guard", ["toy-engine 2.4.1", "frees blocks twice"]),
        ("1.9", "guard", [">=2,<3", "got toy-engine 1.9"]),
        ("3.0", "refuse", [">=2,<3", "got toy-engine 3.0", "newer than tested", "CANARY_UNTESTED=refuse"]),
        (None, "guard", [">=2,<3", "not installed"]),
    ],
)
def test_a_refusal_says_what_and_what_to_do(version, untested, parts, distribution):
    """The version, the reason, and what to install; ``canary plugins`` shows the first two."""
    if version:
        distribution("toy-engine", {}, version=version)
    engine = EngineInfo.of("toy-engine", ">=2,<3", BAD)
    refusal = engine.refusal("plugin 'toy'", "canary-toy", untested)
    for part in ["plugin 'toy'", "install toy-engine>=2,<3 or a release of canary-toy", *parts]:
        assert part in refusal
    assert ("refused" in engine.describe(untested)) == (engine.status in ("known_bad", "newer"))
    assert version is None or f"toy-engine {version}" in engine.describe(untested)


def test_a_version_that_nobody_can_compare(distribution):
    """An engine that was built by hand may have any text there: it is refused with that text, not guessed."""
    distribution("toy-engine", {}, version="git_abc")
    with pytest.raises(PluginError, match=r"toy-engine .* >=2,<3, got 'git_abc'; install"):
        EngineInfo.of("toy-engine", ">=2,<3")


def test_one_that_a_plugin_made_by_itself():
    """Without a status it follows from the version and whether it is supported."""
    assert EngineInfo("toy", "2.4", ">=2", supported=True).status == "tested"
    assert EngineInfo("toy", "1.9", ">=2", supported=False).status == "too_old"
    assert EngineInfo("toy", None, ">=2", supported=False).status == "not_installed"
