"""Pausing and resuming: forwards without Canary, and no false alarm after."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import CanaryError
from canary_core.records import State


class Allocating(ToyEngine):
    """Tells ``guarded`` of the slots that it hands out."""

    guarded: Guarded

    def batch(self, new=None, chunk=8):
        before = {s for r in self.requests for s in r.slots}
        view = super().batch(new, chunk)
        self.guarded.canary.slots.alloc(
            "full", torch.tensor([s for r in self.requests for s in r.slots if s not in before])
        )
        return view


def allocating(**settings: object) -> Guarded:
    """A toy engine that tells of its allocator."""
    engine = Allocating()
    engine.guarded = Guarded(engine, **settings)
    return engine.guarded


def serve(guarded: Guarded, steps: int) -> None:
    """Forwards of one more token of each request; a request that is long enough ends and gives its slots back."""
    for number in range(steps):
        for request in list(guarded.engine.requests):
            request.tokens.append(number % 7 + 3)
            if len(request.tokens) > 20:
                guarded.canary.slots.free("full", torch.tensor(request.slots))
                guarded.engine.finish(request)
                guarded.submit(f"{request.name}.", tokens=4)
        guarded.step()


@pytest.mark.parametrize("settings", [{}, {"profile": "hunt"}], ids=["watch", "hunt"])
def test_nothing_is_checked_while_paused_and_nothing_is_false_after(settings):
    """Slots are written, freed and written by others meanwhile; after it, what is written is judged again."""
    guarded = allocating(scrub_budget="1MiB", **settings)
    for name in "abc":
        guarded.submit(name, tokens=4)
    serve(guarded, 12)
    before = guarded.canary.stats()
    guarded.canary.step.pause()
    serve(guarded, 25)
    during = guarded.canary.stats()
    assert (during["forwards"], during["checked_slots"]) == (before["forwards"], before["checked_slots"])
    assert guarded.canary.step.passed_by == 25
    guarded.canary.step.resume()
    serve(guarded, 60)
    assert guarded.violations == []
    assert guarded.canary.stats()["checked_slots"] > before["checked_slots"]
    # All of it is judged again by now: the requests of the pause have ended.
    request = guarded.engine.requests[0]
    guarded.engine.k[0][request.slots[1], 2] += 1
    serve(guarded, 2)
    assert guarded.violations[0].kind.name == "BYTES"


def test_what_is_there_at_the_end_of_a_pause_is_unknown():
    """Nobody recorded what the forwards in between have written."""
    guarded = Guarded()
    request = guarded.submit(tokens=4)
    guarded.step()
    guarded.canary.step.pause()
    guarded.decode()
    guarded.canary.step.resume()
    guarded.decode()
    states = {State.of(word) for word in guarded.canary.states["full"].records[request.slots[:5], 1].tolist()}
    assert states == {State.UNKNOWN}
    assert guarded.canary.unknown_slots == 5
    assert [e.name for e in guarded.findings.events if e.name in ("paused", "resumed")] == ["paused", "resumed"]
    assert guarded.findings.told("resumed")[0].fields["unchecked_forwards"] == 1


def test_a_pause_without_a_forward_forgets_nothing():
    """What was recorded before is judged after."""
    guarded = Guarded(read_check=-1)
    request = guarded.submit(tokens=4)
    guarded.step()
    guarded.canary.step.pause()
    guarded.canary.step.resume()
    guarded.engine.k[0][request.slots[1], 2] += 1
    guarded.decode()
    assert [v.kind.name for v in guarded.violations] == ["BYTES"]


def test_run_is_paused_too():
    """The forward runs, its view is not asked for, and a run within it is only its forward."""
    guarded = Guarded()
    guarded.canary.step.pause()
    run = guarded.canary.step.run

    def view():
        raise AssertionError("a paused Canary wants no view")

    assert run(lambda: run(lambda: "inner", view), view) == "inner"
    assert guarded.canary.step.passed_by == 1
    assert guarded.canary.enabled


def test_a_canary_that_is_off_can_not_be_paused():
    """Nor can its mode be changed: whoever asks is told why."""
    guarded = Guarded(mode="off")
    with pytest.raises(CanaryError, match="nothing to pause"):
        guarded.canary.step.pause()
    with pytest.raises(CanaryError, match="CANARY_MODE is off"):
        guarded.canary.set_mode("raise")
