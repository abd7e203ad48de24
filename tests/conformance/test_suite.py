"""The conformance suite itself: what it asks of authors, and how it answers bad input."""

import re
import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partialmethod

import pytest
from canary_toy import batch, hooks, pool, session, toy_engine
from canary_toy.session import ToyConformance, ToySession
from canary_toy.toy_engine import Engine
from conformance.many_runs import Memory, failures, in_used_memory
from torch import Tensor

from canary_core import Patches
from canary_core.errors import PluginError
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
from canary_kit.conformance.stage import Ask, Drive
from canary_kit.faults.catalogue import FAULTS


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


@pytest.mark.parametrize(("page", "longest", "passes"), [(64, 40, False), (32, 20, False), (20, 40, True)])
def test_prompts_that_fill_no_page_are_the_sessions_matter(monkeypatch, page, longest, passes) -> None:
    """No adapter is to blame for what can't be reused or parked; the sentence says what to set."""
    for module in (toy_engine, batch, pool, hooks, session):
        monkeypatch.setattr(module, "PAGE", page)

    class Short(ToyConformance):
        longest_prompt = longest

    for outcome in run_suite(Short, ["test_prefix_hits_are_silent", "test_slots_released_twice_are_found"]):
        assert outcome.result == ("passed" if passes else "failed"), outcome.message
        told = rf"session: by the views a page has {page} slots, .* {longest} tokens: .*set longest_prompt"
        assert passes or re.match(told, outcome.message)


def test_a_suite_without_room_for_its_traffic_is_refused() -> None:
    """With the least that it needs, before anything runs."""

    class Small(ToyConformance):
        longest_prompt = 8

    with pytest.raises(Nonconforming, match=r"^session: longest_prompt must be at least 20, .* got 8 and 128"):
        Small().test_prefix_hits_are_silent()


@pytest.mark.parametrize(("evicts", "result"), [(True, "passed"), (False, "failed")])
def test_slots_given_back_to_the_prefix_cache_are_no_fault_until_evicted(evicts, result) -> None:
    """An engine that caches all that a request has parks it, when it is given back too early: that is legal."""

    class Parks(ToySession):
        def release_running(self, request: str) -> None:
            running = self.engine.requests[request]
            self.engine.release([page for page in running.pages if page in self.engine.cache.hashes])

    class AllCached(ToyConformance):
        abilities = ToyConformance.abilities - (frozenset() if evicts else {"evict"})

        def session(self) -> EngineSession:
            return Parks()

    (outcome,) = run_suite(AllCached, ["test_slots_given_back_too_early_are_found"])
    assert outcome.result == result, outcome.message
    assert evicts or re.match(r"session: release_running gave back only slots that .* declare evict", outcome.message)


def test_a_request_computed_again_may_hit_what_others_have_computed_meanwhile(monkeypatch) -> None:
    """It is preempted within its prompt, and goes on further than it had come: no view is missing."""
    monkeypatch.setattr(Engine, "__init__", partialmethod(Engine.__init__, pages=20))
    prompt = tuple(range(1, 40))

    def act(drive: Drive) -> None:
        drive.submit(Ask("first", prompt[:20], 2))
        drive.step()
        drive.session.preempt("first")
        drive.submit(Ask("second", (*prompt, 7), 2))
        while drive.session.engine.requests["second"].computed < 36:  # type: ignore[attr-defined]
            drive.step()
        drive.finish()

    ToyConformance()._silent(act, "a prompt that goes on elsewhere")


def test_a_missing_share_is_not_taken_for_a_name_that_comes_again(monkeypatch) -> None:
    """Whatever finds a wrong plugin first, the part with the bug is blamed."""
    right = Patches.follow

    def follow(patches: Patches, owner: object, name: str, told: Callable[..., object]) -> None:
        if name != "take":
            right(patches, owner, name, told)

    monkeypatch.setattr(Patches, "follow", follow)
    (outcome,) = run_suite(ToyConformance, ["test_names_may_come_again"])
    assert outcome.result == "failed"
    assert outcome.message.startswith("slot events: ")


def test_nothing_of_the_suite_stays_behind() -> None:
    """Plugin and listeners leave the process's manager, the plugin is uninstalled, and its Canaries are closed."""
    before = set(hook_manager().get_plugins())
    assert all(outcome.result == "passed" for outcome in run_suite(ToyConformance, ["test_a_canary_guards_the_pool"]))
    assert set(hook_manager().get_plugins()) == before
    assert not hooks.HOOKS.guards
    engine = ToySession().engine
    assert "forward" not in vars(engine.runner)
