"""The conformance suite itself: what it asks of authors, and how it answers bad input."""

import unittest
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from canary_toy import hooks
from canary_toy.session import ToyConformance, ToySession
from canary_toy.toy_engine import Engine
from conformance.many_runs import Memory, failures, in_used_memory
from torch import Tensor

from canary_core.errors import PluginError
from canary_core.kit.faults.catalogue import FAULTS
from canary_core.plugins import hook_manager
from canary_core.testing import (
    ABILITIES,
    Ability,
    EngineSession,
    Nonconforming,
    PluginConformance,
    run_suite,
    suite_tests,
)


class Lazy(EngineSession):
    """Serves nothing."""

    def pool_tensors(self) -> Mapping[str, Tensor]:
        return {}

    def submit(self, request: str, tokens: Sequence[int], new_tokens: int) -> None:
        pass

    def step(self) -> bool:
        return False

    def answer(self, request: str) -> Sequence[int]:
        return ()

    def poke(self, layer: int, half: str, request: str, position: int) -> None:
        pass


class Undecided(ToyConformance):
    abilities = frozenset()


def test_what_is_not_declared_is_skipped_and_told() -> None:
    """A suite without abilities runs what every plugin must pass, and says of the rest which ability is missing."""
    outcomes = list(run_suite(Undecided))
    assert {o.ability for o in outcomes if o.result == "undeclared"} == set(ABILITIES)
    assert all(o.result == "passed" for o in outcomes if o.ability is None)
    assert all("not declared" in o.message for o in outcomes if o.result == "undeclared")


def test_an_undeclared_test_is_a_skip_for_pytest() -> None:
    """So it shows in pytest's own report."""
    with pytest.raises(unittest.SkipTest, match="'fork' is not declared: the suite does not say why"):
        Undecided().test_forks_are_silent()


def test_a_lacking_ability_says_why() -> None:
    """In the skip's message, and so in the support matrix."""

    class Reasoned(Undecided):
        lacking: Mapping[Ability, str] = {"fork": "the engine runs each request once"}

    with pytest.raises(unittest.SkipTest, match="'fork' is not declared: the engine runs each request once"):
        Reasoned().test_forks_are_silent()


@pytest.mark.parametrize(("lacking", "problem"), [
    ({"time_travel": "too early"}, r"unknown abilities \['time_travel'\]; there are .*fork"),
    ({"fork": "the engine runs each request once"}, r"\['fork'\] are both in abilities and in lacking"),
])  # fmt: skip
def test_a_wrong_reason_is_refused(lacking, problem) -> None:
    """Of an ability that nobody knows, or that is declared."""

    class Wrong(ToyConformance):
        pass

    Wrong.lacking = lacking
    with pytest.raises(Nonconforming, match=problem):
        Wrong().test_forks_are_silent()


def test_every_ability_has_a_test() -> None:
    """No ability can be declared and never tried."""
    tried = {getattr(getattr(ToyConformance, name), "ability", None) for name in suite_tests(ToyConformance)}
    assert tried == {None, *ABILITIES}


def test_an_unknown_ability_is_refused() -> None:
    """With those that there are."""

    class Wrong(ToyConformance):
        abilities = frozenset({"time_travel"})  # type: ignore[arg-type]

    with pytest.raises(Nonconforming, match=r"unknown abilities \['time_travel'\]; there are .*fork"):
        Wrong().test_forks_are_silent()


def test_a_session_that_serves_nothing_is_told() -> None:
    """An author whose session is not finished is not sent to the adapter."""

    class Unfinished(ToyConformance):
        def session(self) -> EngineSession:
            return Lazy()

    with pytest.raises(Nonconforming, match=r"^session: request-\d+ was to be answered with 6 tokens, got 0"):
        Unfinished().test_clean_traffic_is_silent()


def test_an_ability_without_its_method_is_told() -> None:
    """The sentence names the ability and the method."""
    with pytest.raises(NotImplementedError, match=r"ability 'fork' needs Lazy.fork; write it, or take the ability out"):
        Lazy().fork("a", "b")


def test_a_plugin_that_is_not_installed_is_told() -> None:
    """With the names of those that are."""

    class Missing(PluginConformance):
        plugin = "nowhere"

    with pytest.raises(PluginError, match=r"'nowhere', which is not installed; installed plugins: "):
        Missing().test_a_canary_guards_the_pool()


@pytest.mark.parametrize("name", suite_tests(ToyConformance))
def test_each_test_may_be_the_first(name: str) -> None:
    """A session that loads what the others share, and makes a pool for that, passes each test by itself: workers take
    them in any order."""
    loaded: list[Engine] = []

    class LoadsOnce(ToyConformance):
        def session(self) -> EngineSession:
            if not loaded:
                loaded.append(Engine())
            return ToySession()

    getattr(LoadsOnce(), name)()


@pytest.mark.parametrize("run", [0, 2])
def test_a_right_plugin_passes_whatever_lay_in_memory(monkeypatch, run) -> None:
    """A pool that nobody clears has what the suite's own stages left, so that first writes may change nothing; pages
    are handed out in another order in each of `conformance.many_runs`."""
    assert failures(run, monkeypatch) == []


@pytest.mark.parametrize("parks", [False, True])
def test_where_nothing_is_parked_every_slot_in_use_may_be_read(monkeypatch, parks) -> None:
    """Then the fault in a slot that nobody reads has nothing to break, and no plugin is to blame."""
    name = "real_kv_unused_cache"
    monkeypatch.setitem(FAULTS, name, replace(FAULTS[name], inject=lambda scene: None))

    class OneFault(ToyConformance):
        faults = (name,)
        abilities = ToyConformance.abilities if parks else ToyConformance.abilities - {"park"}

    (outcome,) = run_suite(OneFault, ["test_faults_are_found"])
    assert outcome.result == ("failed" if parks else "passed"), outcome.message
    assert ("found nothing to break" in outcome.message) == parks


def test_a_pool_in_which_no_slot_comes_round_is_the_sessions_matter(monkeypatch) -> None:
    """Nothing is wrong with the adapter, and the sentence does not say so."""
    in_used_memory(monkeypatch, Memory(order="first"), pages=4000)
    (outcome,) = run_suite(ToyConformance, ["test_faults_are_found"])
    assert outcome.result == "failed"
    assert outcome.message.startswith("session: fault lost_write")
    assert "smaller pool" in outcome.message


def test_nothing_of_the_suite_stays_behind() -> None:
    """Plugin and listeners leave the process's manager, the plugin is uninstalled, and its Canaries are closed."""
    before = set(hook_manager().get_plugins())
    assert all(outcome.result == "passed" for outcome in run_suite(ToyConformance, ["test_a_canary_guards_the_pool"]))
    assert set(hook_manager().get_plugins()) == before
    assert not hooks.HOOKS.guards
    engine = ToySession().engine
    assert "forward" not in vars(engine.runner)
