"""The files of kinds: each kind has one, whole, and what they say of findings stays as it is."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import sentences

from canary_core import CanaryError, Kind, Phase, Violation
from canary_core.kinds import registry
from canary_core.kinds.finding_kind import FindingKind
from canary_core.records import PROBE, Counter
from canary_kit.conformance.problems import Nonconforming, require_silence


@pytest.fixture
def read_anew():
    """Kinds are read once a process; here again, and once more by who comes later."""
    registry.load.cache_clear()
    yield
    registry.load.cache_clear()


def test_what_is_said_of_findings_stays():
    """Sentences and diagnoses of crafted findings of each kind; ``PYTHONPATH=src:tests python -m support.sentences >
    tests/incidents/sentences.txt`` writes them anew."""
    assert sentences.text() == Path(__file__).with_name("sentences.txt").read_text()


@pytest.mark.parametrize("kind", Kind)
def test_each_sentence_is_said_of_something(kind):
    """One that comes behind a condition which covers its own would never be."""
    found = [Violation(kind, "full", phase, 8, **fields) for phase in Phase for fields in sentences.VARIANTS]
    said = {next(s for s in registry.of(kind).sentences if s.when(violation)) for violation in found}
    assert said == set(registry.of(kind).sentences)


def test_a_kind_without_a_file_is_an_error_at_once(read_anew, monkeypatch):
    """Before there is any finding, with the file that is missing."""
    monkeypatch.setattr(registry, "Kind", [*Kind, SimpleNamespace(name="TOO_LATE")])
    with pytest.raises(CanaryError, match=r"TOO_LATE needs a file canary_core\.kinds\.too_late with a FindingKind"):
        registry.load()


def test_a_file_of_another_kind_is_an_error_at_once(read_anew, monkeypatch):
    """As where a file was copied and not changed."""
    monkeypatch.setitem(sys.modules, "canary_core.kinds.token", sys.modules["canary_core.kinds.position"])
    with pytest.raises(CanaryError, match=r"KIND of canary_core\.kinds\.token is no FindingKind of TOKEN"):
        registry.load()


def test_two_kinds_at_one_place_are_an_error_at_once(read_anew, monkeypatch):
    """Nobody could say which is the cause."""
    token = registry.of(Kind.TOKEN)
    registry.load.cache_clear()
    fields = {name: getattr(token, name) for name in FindingKind.__dataclass_fields__}
    monkeypatch.setattr("canary_core.kinds.token.KIND", FindingKind(**{**fields, "place": 160}))
    with pytest.raises(CanaryError, match="the place 160 of position is that of another kind, too"):
        registry.load()


def test_numbers_of_kinds_are_those_of_counters():
    """The device counts each kind at its number, before all other counters; one number stands for the alarm's probe."""
    assert max(Kind) < Counter.FIRST
    assert PROBE not in list(Kind)


@pytest.mark.parametrize("kind", Kind)
def test_the_conformance_suite_blames_a_part_of_a_plugin(kind):
    """Whatever is found on an engine that does nothing wrong."""
    with pytest.raises(Nonconforming) as raised:
        require_silence([Violation(kind, "full", Phase.PRE_FORWARD, 8)], [], "serving")
    assert registry.of(kind).blame.hint in str(raised.value)


def test_guarding_a_pool_reads_all_kinds(read_anew, guarded):
    """So that no file is read when something is found."""
    assert registry.load.cache_info().currsize == 1
