"""`Summary`: one event at the end says what was checked, and which zeros should not be zero."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import Event, Kind


def summary(guarded: Guarded) -> Event:
    """The only one, at the end."""
    guarded.canary.close()
    guarded.canary.close()
    (event,) = guarded.findings.told("summary")
    return event


def follow(guarded: Guarded) -> None:
    """What a plugin that follows the allocator tells."""
    for region in guarded.canary.regions:
        guarded.canary.slots.alloc(region, torch.tensor([60]))


def serve(guarded: Guarded, decodes: int = 20) -> None:
    """A prompt of three tokens, and so many decodes."""
    guarded.submit()
    guarded.step()
    for _ in range(decodes):
        guarded.decode()


def test_a_sound_run_has_no_warning():
    """Its counts are those of the device, the events those of each region, and the level is info."""
    guarded = Guarded(ToyEngine(window=8), read_check=-1)
    follow(guarded)
    serve(guarded)
    event = summary(guarded)
    assert (event.level, event.fields["warnings"]) == ("info", [])
    stats = guarded.canary.stats()
    for name in ("checked_forwards", "checked_slots", "recorded_slots", "checked_bytes"):
        assert event.fields[name] == stats[name] > 0
    assert (event.fields["forwards"], event.fields["unchecked_forwards"]) == (21, 0)
    assert event.fields["events"] == {"full": {"alloc": 1}, "window": {"alloc": 1}}
    assert (event.fields["findings"], event.fields["coverage_ratio"]) == ({}, 1.0)
    assert event.fields.keys().isdisjoint({"withheld", "repeated", "dismissed", "misuses"})
    assert str(event.fields["summary"]).startswith("21 forwards, ")
    assert str(event.fields["summary"]).endswith(" checked, no finding")


def test_what_was_found_is_in_it_by_kind():
    """Also what closing finds."""
    guarded = Guarded()
    follow(guarded)
    serve(guarded)
    for _ in range(2):
        guarded.canary.slots.free("full", torch.tensor([50, 51]))
    event = summary(guarded)
    assert event.fields["findings"] == {"double_free": 2}
    assert "2 findings (double_free 2)" in event.fields["summary"]


def nothing(guarded: Guarded) -> None:
    """A hook that was never called."""


def no_view(guarded: Guarded) -> None:
    """An adapter whose view is always None."""
    for _ in range(3):
        guarded.canary.step.run(lambda: None, lambda: None)


def no_after(guarded: Guarded) -> None:
    """A step without its second half."""
    guarded.submit(tokens=30)
    for _ in range(3):
        guarded.canary.step.before(guarded.engine.batch(chunk=2))
        guarded.canary.step.abandon()
        guarded.canary.step.end()


def no_end(guarded: Guarded) -> None:
    """A step that never ends."""
    guarded.submit(tokens=30)
    for _ in range(3):
        batch = guarded.engine.batch(chunk=2)
        guarded.canary.step.before(batch)
        guarded.engine.forward(batch)
        guarded.canary.step.after(batch)


def no_prefix(guarded: Guarded) -> None:
    """An adapter that says of each token that it is a request's first."""
    for name in "abc":
        guarded.engine.requests.clear()
        guarded.submit(name)
        guarded.step()


def refused(guarded: Guarded) -> None:
    """An event of a region that there is not."""
    serve(guarded)
    guarded.canary.slots.free("mamba", torch.tensor([1]))


def failed(guarded: Guarded) -> None:
    """An error of ours."""
    serve(guarded)
    guarded.canary.fail("batch", RuntimeError("broken"))


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (nothing, "no forward was checked: neither step.run nor step.before was called"),
        (no_view, "no forward was checked: the view of each of 3 was None"),
        (no_after, "no slot was recorded: step.after was not called"),
        (no_end, "step.end was never called"),
        (no_prefix, "no slot was checked: no forward read what an earlier one wrote"),
        (refused, "1 calls were refused: see misuse"),
        (failed, "Canary was switched off by an error"),
    ],
)
def test_a_zero_that_should_not_be_is_a_warning(run: Callable[[Guarded], None], says: str) -> None:
    """Each with a sentence, and the level says so."""
    guarded = Guarded(read_check=-1)
    follow(guarded)
    run(guarded)
    event = summary(guarded)
    assert event.level == "warning"
    assert any(sentence.startswith(says) for sentence in event.fields["warnings"])


def test_a_region_of_which_nothing_was_told_is_a_warning():
    """By name; not where the settings ask for no allocator, nor of one of which anything was told."""
    for settings, expected in (({}, 1), ({"lifetime": False}, 0)):
        guarded = Guarded(ToyEngine(window=8), read_check=-1, **settings)
        guarded.canary.slots.clear("full", None)
        serve(guarded)
        warnings = summary(guarded).fields["warnings"]
        assert len(warnings) == expected
        assert all("allocator of region 'window'" in sentence for sentence in warnings)


@pytest.mark.parametrize(
    ("settings", "decodes", "warned"),
    [
        ({"scrub_budget": "0"}, 3, True),
        ({"scrub_budget": "0", "bytes": "off"}, 30, False),
        ({"read_check": 64}, 30, False),
    ],
)
def test_bytes_that_nobody_compared_are_a_warning(settings, decodes, warned):
    """Where nothing was to compare them; not where that was asked for."""
    guarded = Guarded(**settings)
    follow(guarded)
    serve(guarded, decodes)
    warnings = summary(guarded).fields["warnings"]
    assert [sentence.startswith("no byte was compared: ") for sentence in warnings] == [True] * warned


def test_findings_that_were_not_told_are_counted_in_it():
    """Those that a wrong_memory event explains."""
    guarded = Guarded()
    follow(guarded)
    guarded.canary._findings.memory.withheld[Kind.LOST_WRITE] = 7
    serve(guarded)
    event = summary(guarded)
    assert event.fields["withheld"] == 7
    assert "7 findings were counted and not told: see wrong_memory" in event.fields["warnings"]


def test_in_off_mode_there_is_none():
    """Nothing was to be checked."""
    guarded = Guarded(mode="off")
    guarded.canary.close()
    assert guarded.findings.events == []


SCRIPT = """
import os, sys, torch
from support.guarded import Guarded
guarded = Guarded(read_check=-1)
guarded.canary.slots.alloc("full", torch.tensor([60]))
guarded.submit(tokens=30)
for _ in range(4):
    guarded.step(chunk=2)
guarded.canary.slots.free("full", torch.tensor([60, 60]))
if "close" in sys.argv:
    guarded.canary.close()
if "fork" in sys.argv and os.fork():
    os.wait()
    guarded.canary.close()
if "broken" in sys.argv:
    guarded.canary._findings.collect = lambda: 1 / 0
"""


@pytest.mark.parametrize("how", ["", "close", "fork", "broken"])
def test_a_process_that_ends_tells_it_once(how):
    """Whether the Canary was closed or not, not from a child that was forked, and where the device can't be read with
    what the host knew."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CANARY_LOG_FORMAT": "json"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    (event,) = (event for event in told if event["event"] == "summary")
    assert (event["forwards"], event["checked_forwards"], event["checked_slots"]) == (4, 4, 12)
    assert event["findings"] == ({} if how == "broken" else {"double_free": 1})
    assert event["warnings"] == []
