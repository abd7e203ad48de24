"""What bounds of Canary's own leave out is counted by reason."""

from types import SimpleNamespace

import pytest
import torch
from support.guarded import Guarded

from canary_adapters import unknown_tokens
from canary_adapters.block_lists import MOST_BLOCKS, BlockLists
from canary_core import Writers
from canary_core.batch import tokens_cut
from canary_core.runtime.workspace import MOST_SORTS
from canary_desk.metrics.readings import MetricReading


@pytest.mark.parametrize(("longest", "cut"), [(65_500, False), (65_537, True), (200_000, True)])
def test_a_table_of_tokens_that_was_cut_is_seen_by_its_shape(longest, cut):
    """As adapters make it, for 64 requests of which the longest has so many positions."""
    table = unknown_tokens(64, longest, torch.device("cpu"))
    assert tokens_cut(SimpleNamespace(expected_tokens=table)) is cut
    assert not tokens_cut(SimpleNamespace(expected_tokens=None))


def test_rows_of_a_table_that_wait_for_their_turn_are_counted():
    """Two of three rows do not fit beside the first one; a row without blocks waits for nothing."""
    g = Guarded()
    BlockLists(g.canary).kept([range(MOST_BLOCKS), None, range(MOST_BLOCKS), range(MOST_BLOCKS)], 4)
    assert g.canary.left_out["table_rows_left"] == 2
    assert g.canary.stats()["table_rows_left"] == 2
    assert MetricReading.of(g.canary).skipped["table_rows_left"] == 2


def test_sorts_of_misuse_beyond_the_bound_are_counted():
    """They are told no more, but the count goes on."""
    g = Guarded()
    for sort in range(MOST_SORTS + 3):
        g.canary._switch.misuse(f"sort {sort}")
    assert len(g.findings.told("misuse")) == MOST_SORTS
    assert g.canary.left_out["misuses_untold"] == 3


def test_sampled_tokens_that_fit_no_forward_are_counted():
    """As after a forward that was not recorded, or of another size."""
    g = Guarded()
    assert g.canary.sampled.follow()
    g.canary.sampled.give(torch.zeros(3, dtype=torch.int64))
    assert g.canary.left_out["samples_left"] == 1


def test_incidents_that_nobody_could_look_at_are_told(monkeypatch):
    """Beyond those that wait: each by its number."""
    monkeypatch.setattr("canary_desk.incidents.investigator.MOST_WAITING", 0)
    g = Guarded(read_check=-1)
    request = g.submit(tokens=8)
    g.step()
    g.engine.k[0][request.slots[2]] += 1
    g.decode()
    g.canary.drain()
    (event,) = g.findings.told("diagnosis_failed")
    assert event.fields["incident"] == 1
    assert "wait to be looked at" in event.fields["error"]


def test_names_and_identities_that_are_forgotten_are_counted():
    """Of three requests two are remembered."""
    writers = Writers(2)
    for name in "abc":
        writers.identify(name, lora=name)
        writers.id(name)
    assert (writers.forgotten, writers.anchors_forgotten) == (1, 1)


def test_nothing_is_left_out_of_little():
    """All reasons are there from the start, at zero, and none in the stats."""
    g = Guarded()
    assert not any(g.canary.left_out.values())
    assert g.canary.left_out.keys() <= MetricReading.of(g.canary).skipped.keys()
    assert not g.canary.left_out.keys() & g.canary.stats().keys()
