"""`Forward`: who is handed out for the forward that comes, and what an error of ours is called by."""

import ast
import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from support.guarded import Guarded

import canary_core
from canary_core.guard import forward
from canary_core.guard.forward import Forward, Measured, PassedBy
from canary_core.guard.overhead import FIRST

ROOMS = [Path(canary_core.__file__).parent / name for name in ("guard", "watchers")]
BESIDE_CALLS = {"audit"}
"""The audit of forwards, which no call of its own begins."""


def places() -> Iterator[str]:
    """What `Switch.guard` and `Switch.fail` are given as ``where`` in rooms that a forward passes through."""
    for file in sorted(path for room in ROOMS for path in room.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                where = node.args[0]
                if node.func.attr in ("guard", "fail") and isinstance(where, ast.Constant):
                    yield where.value


def test_where_names_a_call_that_exists():
    """Of a Canary; and its argument, where that is a function of the plugin's."""
    canary = Guarded(ranks_interval=1).canary
    named = sorted(set(places()) - BESIDE_CALLS)
    assert {"step.before", "step.after", "step.end", "step.run(view=)", "slots.copy", "ledger.expect"} <= set(named)
    for where in named:
        call, argument = re.fullmatch(r"([\w.]+?)(?:\((\w+)=\))?", where).groups()
        found = attrgetter(call)(canary)
        assert callable(found), where
        assert argument is None or argument in inspect.signature(found).parameters, where


def coming(guarded: Guarded) -> type:
    """The sort of forward that `Step` has for the one that comes."""
    return type(guarded.canary.step._coming())


def test_a_canary_that_is_on_has_one_object_for_all_forwards():
    """None is made for a forward: it would cost the engine."""
    guarded = Guarded()
    guarded.submit(tokens=20)
    seen = set()
    for _ in range(5):
        seen.add(id(guarded.canary.step._coming()))
        guarded.decode()
    assert len(seen) == 1
    assert coming(guarded) is Forward


def test_one_forward_of_many_is_measured():
    """The same one, with a clock around it."""
    guarded = Guarded()
    guarded.submit(tokens=20)
    sorts = []
    for _ in range(FIRST + 2):
        sorts.append(coming(guarded))
        guarded.decode()
    assert sorts == [Forward] * FIRST + [Measured, Forward]
    assert guarded.canary.forwards == FIRST + 2


@pytest.mark.parametrize("why", ["off", "failed", "paused"])
def test_a_canary_that_is_off_or_paused_has_one_that_does_nothing(why):
    """It is issued after nobody, checks nothing, and its record is no misuse, nor is it one to leave it out."""
    guarded = Guarded(mode="off" if why == "off" else "log")
    guarded.submit(tokens=4)
    if why == "failed":
        guarded.canary.fail("somewhere", RuntimeError("broken"))
    if why == "paused":
        guarded.canary.step.pause()
    assert coming(guarded) is PassedBy
    told = len(guarded.findings.events)
    view, step = guarded.engine.batch(), guarded.canary.step
    for _ in range(2):
        assert not step.issues_first(canary_core.Overlap.NEXT)
        step.before(view)
    step.after()
    step.end()
    assert step.forwards == 0
    assert step.last_view is None
    assert len(guarded.findings.events) == told


def test_what_was_put_off_is_done_before_the_first_forward_is_handed_out():
    """Once, by whoever asks first."""
    guarded = Guarded()
    calls = []

    def put_off() -> None:
        calls.append("warm-up")
        guarded.canary._switch.put_off = None

    guarded.canary._switch.put_off = put_off
    assert [coming(guarded) for _ in range(2)] == [Forward] * 2
    assert calls == ["warm-up"]


def test_a_pause_between_the_halves_of_a_forward_is_of_the_next_one():
    """What was checked is recorded; the forward after it passes by, with both its halves."""
    guarded = Guarded()
    guarded.submit(tokens=6)
    engine, step = guarded.engine, guarded.canary.step

    def halves(between=lambda: None) -> None:
        view = engine.batch(chunk=2)
        step.before(view)
        engine.forward(view)
        between()
        step.after()
        step.end()

    halves(step.pause)
    recorded = guarded.canary.stats()["recorded_slots"]
    halves(step.resume)
    halves()
    guarded.canary.drain()
    assert (recorded, guarded.canary.stats()["recorded_slots"]) == (2, 4)
    assert (step.forwards, step.passed_by) == (2, 1)
    assert guarded.findings.told("misuse") == []
    assert guarded.violations == []


def test_the_record_of_a_forward_that_passed_by_is_asked_for_once():
    """What comes after it is as ever: a record without a check is a misuse."""
    guarded = Guarded()
    guarded.submit(tokens=6)
    step = guarded.canary.step
    step.pause()
    step.before(guarded.engine.batch(chunk=2))
    step.after()
    step.resume()
    assert guarded.findings.told("misuse") == []
    step.after()
    (event,) = guarded.findings.told("misuse")
    assert event.fields["reason"].startswith("step.after was called without step.before")


def test_an_abandoned_forward_of_a_pause_leaves_the_next_one_as_any_other():
    """Its record is not taken for that of the one that was abandoned."""
    guarded = Guarded()
    request = guarded.submit(tokens=6)
    step = guarded.canary.step
    step.pause()
    step.before(guarded.engine.batch(chunk=2))
    step.abandon()
    step.resume()
    del request.slots[:]
    guarded.step(chunk=2)
    assert guarded.canary.stats()["recorded_slots"] == 2
    assert guarded.findings.told("misuse") == []


def test_forwards_without_an_end_are_counted_anew_after_one(monkeypatch):
    """Also where some were abandoned: these began, too."""
    monkeypatch.setattr(forward, "UNENDED_FORWARDS", 3)
    guarded = Guarded()
    guarded.submit(tokens=3)
    step, view = guarded.canary.step, guarded.engine.batch(chunk=1)
    step.before(view)
    step.abandon()
    step.end()
    for _ in range(2):
        step.before(view)
        step.after()
    assert guarded.findings.told("misuse") == []
    step.before(view)
    step.after()
    (event,) = guarded.findings.told("misuse")
    assert "step.end was not called" in event.fields["reason"]


def test_a_forward_that_is_no_view_uses_up_no_view():
    """In raise mode its adapter hears of it, and the next forward is as any other."""
    guarded = Guarded(mode="raise")
    guarded.submit(tokens=4)
    step = guarded.canary.step
    with pytest.raises(canary_core.AttachError):
        step.before({"prefix_lens": torch.zeros(1)})
    guarded.step(chunk=2)
    assert guarded.canary.stats()["recorded_slots"] == 2
