"""A device without memory left for Canary: forwards pass by for a while, and nothing false is told afterwards."""

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core.guard import pause


def failing(guarded, monkeypatch, op, times=1):
    """The next calls of an op of the back end find no memory."""
    left, backend = [times], guarded.canary._workspace.backend
    real = getattr(backend, op)

    def without_memory(*arguments, **named):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return real(*arguments, **named)

    object.__setattr__(backend, op, without_memory)
    return lambda: object.__setattr__(backend, op, real)


@pytest.mark.parametrize("op", ["check", "fingerprint_record", "scrub"])
def test_it_goes_on_after_a_while(op, monkeypatch):
    """Whichever part of a forward fails: no false finding, and a later flip is told."""
    monkeypatch.setattr(pause, "FIRST_REST_S", 0.0)
    guarded = Guarded(ToyEngine(layers=3), read_check=-1)
    request = guarded.submit("a", 24)
    guarded.step(4)
    undo = failing(guarded, monkeypatch, op)
    try:
        for _ in range(4):
            guarded.step(4)
    finally:
        undo()
    (event,) = guarded.findings.told("out_of_memory")
    assert event.fields["again_s"] == 0.0
    assert guarded.canary.enabled
    assert guarded.findings.told("disabled") == []
    assert guarded.violations == []
    guarded.step(4)
    guarded.engine.k[1].view(torch.int32)[request.slots[22], 3] ^= 1 << 9
    guarded.decode()
    guarded.canary.drain()
    assert [v.source for v in guarded.violations] == ["k.1"]


def test_until_then_forwards_pass_by(monkeypatch):
    """And each such pause is twice as long as the last."""
    now = [0.0]
    monkeypatch.setattr(pause.time, "monotonic", lambda: now[0])
    guarded = Guarded(ToyEngine(layers=3), read_check=-1)
    guarded.submit("a", 40)
    guarded.step(4)
    undo = failing(guarded, monkeypatch, "check", 2)
    try:
        guarded.step(4)
        assert guarded.canary.step.paused
        guarded.step(4)
        assert guarded.canary.step.passed_by == 1
        now[0] = 61.0
        guarded.step(4)
    finally:
        undo()
    assert [e.fields["again_s"] for e in guarded.findings.told("out_of_memory")] == [60.0, 120.0]
    guarded.canary.step.resume()
    guarded.step(4)
    assert not guarded.canary.step.paused
    assert guarded.violations == []


def test_raise_mode_raises_it(monkeypatch):
    """A test must not pass without its checks."""
    guarded = Guarded(ToyEngine(layers=3), read_check=-1, mode="raise")
    guarded.submit("a", 24)
    undo = failing(guarded, monkeypatch, "check")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            guarded.step(4)
    finally:
        undo()
