"""How a plugin begins to guard a pool, and what is told where it can't."""

import socket
from contextlib import nullcontext

import pytest
from support.guarded import Guarded

from canary_core import CanaryConfig, Uncovered
from canary_core.guard.attach import attach, report_unguarded
from canary_core.plugins import private_hooks
from canary_core.testing import Findings

HERE = {"host": socket.gethostname(), "replica": 0, "rank": 0}
"""Whose pool it is, without settings."""


def broken() -> object:
    """A pool that its adapter does not understand."""
    raise KeyError("kv_buffer")


def test_what_was_built_is_given_back(findings):
    """A pool that can be guarded, and one where there is nothing to guard: nothing is told of either here."""
    built = object()
    assert attach("attach to toy", CanaryConfig.load(), lambda: built) is built
    assert attach("attach to toy", CanaryConfig.load(), lambda: None) is None
    assert findings.events == []


def test_in_log_mode_the_engine_goes_on_unguarded(findings):
    """An exception becomes a ``disabled`` event that says where and why."""
    assert attach("attach to toy", CanaryConfig.load(mode="log"), broken) is None
    (event,) = findings.told("disabled")
    assert event.level == "error"
    assert event.fields == {**HERE, "where": "attach to toy", "error": "'kv_buffer'"}


def test_whose_pool_it_is_is_told_where_it_can_not_be_guarded(findings):
    """What the plugin has found out of its process, not what the environment said: of exceptions and of reasons. After
    that nobody is just attached any more."""
    config = CanaryConfig.load(replica=2, rank=1, served_model="llama")
    attach("attach to toy", config, broken)
    attach("attach to toy", config, lambda: report_unguarded([Uncovered("pool", 5, "FP4 pages")]))
    report_unguarded([Uncovered("pool", 5, "FP4 pages")])
    disabled, coverage, alone = findings.events
    place = {**HERE, "replica": 2, "rank": 1, "model": "llama"}
    for event in (disabled, coverage):
        assert place.items() <= event.fields.items()
    assert place.keys().isdisjoint(alone.fields)


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_a_canary_is_closed_where_what_is_made_around_it_fails(mode):
    """Nobody would call it: it must not count as a guard, in metrics or at the end of the process."""
    made = []

    def build() -> object:
        made.append(Guarded(mode=mode))
        raise KeyError("scheduler")

    with pytest.raises(KeyError) if mode == "raise" else nullcontext():
        attach("attach to toy", CanaryConfig.load(mode=mode), build)
    (guarded,) = made
    assert not guarded.canary.enabled
    assert [event.name for event in guarded.findings.events if event.name == "summary"] == ["summary"]


def test_in_raise_mode_it_is_raised(findings):
    """A test that was to run guarded must not pass unguarded."""
    with pytest.raises(KeyError):
        attach("attach to toy", CanaryConfig.load(mode="raise"), broken)
    assert findings.events == []


def test_a_pool_that_is_not_guarded_is_a_warning_with_the_reason(findings):
    """It is told as coverage of nothing, with the model where it has a name."""
    report_unguarded([Uncovered("pool", 5, "FP4 pages")])
    report_unguarded([Uncovered("pool", 5, "FP4 pages")], model="draft")
    first, second = findings.told("coverage")
    assert (first.level, first.fields["coverage_ratio"]) == ("warning", 0.0)
    assert first.fields["uncovered"] == [{"name": "pool", "bytes": 5, "reason": "FP4 pages"}]
    assert "model" not in first.fields
    assert second.fields == {"model": "draft", "draft": True, **first.fields}


def test_private_hooks_hear_of_their_own_and_the_process_of_all(findings):
    """What is told to private hooks reaches the plugins of the process too, but not the other way round."""
    alone = Findings()
    hooks = private_hooks(alone)
    report_unguarded([Uncovered("pool", 5, "FP4 pages")])
    report_unguarded([Uncovered("pool", 6, "FP4 pages")], hooks=hooks)
    attach("attach to toy", CanaryConfig.load(mode="log"), broken, hooks)
    assert [e.name for e in alone.events] == ["coverage", "disabled"]
    assert [e.name for e in findings.events] == ["coverage", "coverage", "disabled"]
