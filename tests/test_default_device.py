"""The process may have another default device: ``torch.set_default_device("cuda")`` is usual in scripts.

Here it is ``meta`` within all that an engine calls, which has no bytes: whatever were made there would be noticed.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import Canary, Kind
from canary_core.guard.slots import SlotEvents
from canary_core.guard.step import Step


def elsewhere(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` with another default device."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return method(*args, **kwargs)

    return call


@pytest.fixture
def another_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all calls of an engine's adapter."""
    for owner in (Canary, Step, SlotEvents):
        for name, method in list(vars(owner).items()):
            if callable(method) and (name == "__init__" or not name.startswith("_")):
                monkeypatch.setattr(owner, name, elsewhere(method))


@pytest.mark.usefixtures("another_default")
@pytest.mark.parametrize("settings", [{}, {"store_check": True}, {"profile": "hunt"}, {"bytes": "partial"}])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_another_default_device_changes_nothing(backend, settings):
    """Clean forwards are silent, a flip is found and explained."""
    engine = ToyEngine(slots=256, window=8)
    guarded = Guarded(engine, backend=backend, **{"read_check": -1, "scrub_budget": "1MiB", **settings})
    for i in range(3):
        engine.submit(f"r{i}", list(range(5, 20)))
        guarded.step()
    guarded.canary.drain()
    assert guarded.violations == []
    request = engine.requests[0]
    source = guarded.canary.states["full"].sources[0]
    source.tensor.view(torch.uint8).view(256, -1)[request.slots[2], 0] ^= 4
    guarded.decode()
    guarded.canary.close()
    assert {(v.kind, v.slot) for v in guarded.violations} == {(Kind.BYTES, int(request.slots[2]))}
    assert [e.fields["diagnosis"] for e in guarded.findings.told("diagnosis")] == ["flipped_bit"]
    assert guarded.findings.told("disabled") == []
