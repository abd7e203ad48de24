"""`Canary`: what begins, counts, is told and ends beside a step."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import AttachError, Canary, CanaryConfig, Kind, KVSource, Phase, Region, Violation, hookimpl

FOUND = Violation(Kind.BYTES, "full", Phase.SCRUB, step=9, slot=5)


class Attachments:
    """A plugin that keeps every `Canary` that begins and ends."""

    def __init__(self) -> None:
        self.attached: list[Canary] = []
        self.detached: list[Canary] = []

    @hookimpl
    def canary_attached(self, canary: Canary) -> None:
        self.attached.append(canary)

    @hookimpl
    def canary_detached(self, canary: Canary) -> None:
        assert canary.enabled, "its last findings are reported by now, and nothing is off yet"
        self.detached.append(canary)


def test_plugins_hear_once_of_its_begin_and_its_end():
    """However often it is closed."""
    plugin = Attachments()
    canary = Guarded(None, plugin).canary
    assert (plugin.attached, plugin.detached) == ([canary], [])
    canary.close()
    canary.close()
    assert (plugin.attached, plugin.detached) == ([canary], [canary])
    assert not canary.enabled


def test_in_off_mode_plugins_hear_of_nothing():
    """Neither a begin nor an end."""
    plugin = Attachments()
    canary = Guarded(None, plugin, mode="off").canary
    canary.close()
    assert (plugin.attached, plugin.detached) == ([], [])


def test_closing_reports_what_is_left(guarded):
    """What the device found last, and what events that still wait find."""
    for _ in range(2):
        guarded.canary.slots.free("full", torch.tensor([9]))
    guarded.canary.close()
    assert [(v.kind, v.slot) for v in guarded.violations] == [(Kind.DOUBLE_FREE, 9)]
    assert guarded.canary.report([FOUND]) == 0
    assert len(guarded.violations) == 1


def test_a_closed_one_gives_its_memory_back_where_it_is_told_to(guarded):
    """At once, whoever still has it; while it guards anything, nothing happens. What was counted stays."""
    canary = guarded.canary
    state = canary.states["full"]
    tensors = state.records, state.fingerprints, state.listed, state.scratch.claims, state.shared.ring
    canary.release()
    assert all(tensor.untyped_storage().nbytes() for tensor in tensors)
    canary.slots.free("full", torch.tensor([9]))
    canary.slots.free("full", torch.tensor([9]))
    canary.close()
    canary.release()
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    canary.slots.free("full", torch.tensor([9]))
    canary.drain()
    assert canary.stats()["double_free"] == 1


def test_plugins_count_beside_the_device(guarded):
    """Their names stand among the counters, with the forwards and what was found."""
    guarded.submit()
    guarded.step()
    guarded.canary.count("windows")
    guarded.canary.count("windows", 4)
    guarded.canary.report([FOUND])
    stats = guarded.canary.stats()
    assert (stats["windows"], stats["forwards"], stats["violations"], stats["bytes"]) == (5, 1, 1, 1)
    assert stats["recorded_slots"] == 3
    assert {"rows", "drained"}.isdisjoint(stats)


def test_stats_are_told_every_so_many_steps():
    """With the scrub's, once it knows how long a step is."""
    guarded = Guarded(stats_interval=2)
    guarded.submit(tokens=10)
    for _ in range(5):
        guarded.step(chunk=2)
    told = guarded.findings.told("stats")
    assert [event.fields["forwards"] for event in told] == [2, 4]
    assert told[-1].fields["scrub_coverage"] > 0


@pytest.mark.parametrize(("read_check", "compares"), [(0, False), (64, True), (-1, True)])
def test_which_regions_are_compared_before_they_are_read(read_check, compares):
    """By the settings; no region of another name."""
    canary = Guarded(ToyEngine(window=8), read_check=read_check).canary
    assert [canary.compares_reads(name) for name in ("full", "window", "mamba")] == [compares, compares, False]


@pytest.mark.parametrize("mode", ["log", "off"])
def test_regions_that_can_not_be_one_canarys_are_refused(mode):
    """None at all, two of one name, two devices; whatever the mode."""
    config, engine = CanaryConfig.load(mode=mode), ToyEngine()
    elsewhere = Region("elsewhere", 4, (KVSource(torch.zeros(4, 8, device="meta"), "k", 0, 32, 32),))
    with pytest.raises(AttachError, match="at least one region, got none"):
        Canary([], config)
    with pytest.raises(AttachError, match=r"different names, got \['full', 'full'\]"):
        Canary([engine.region(), engine.region()], config)
    with pytest.raises(AttachError, match="'elsewhere' on meta and 'full' on cpu; make one Canary a device"):
        Canary([engine.region(), elsewhere], config)
