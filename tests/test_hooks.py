"""When a plugin's hooks are called, on a toy engine."""

import pytest
from support.toy import ToyEngine

from canary_core import Canary, CanaryConfig, hookimpl
from canary_core.plugins import Plugins


class Recorder:
    """Writes down every hook that is called, and how many slots had been checked and recorded by then."""

    def __init__(self) -> None:
        self.calls = []

    @hookimpl
    def canary_attached(self, canary):
        self.calls.append(("attached", tuple(canary.regions)))

    @hookimpl
    def canary_pre_forward(self, canary, batch):
        self.calls.append(("pre_forward", batch.rows, canary.states["full"].records.any().item()))

    @hookimpl
    def canary_post_forward(self, canary, batch):
        self.calls.append(("post_forward", batch.rows, canary.states["full"].records.any().item()))

    @hookimpl
    def canary_violation(self, violation):
        self.calls.append(("violation", violation.kind.name))

    @hookimpl
    def canary_event(self, event):
        self.calls.append(("event", event.name))


class Vet:
    """Dismisses everything."""

    @hookimpl
    def canary_dismiss(self, violation):
        return "the engine explains it"


@pytest.fixture
def engine():
    """A toy engine with one request of 8 tokens."""
    engine = ToyEngine()
    engine.submit("r", list(range(20, 28)))
    return engine


def run(engine: ToyEngine, *hooks: object, chunk: int = 8) -> Canary:
    """One guarded forward with ``hooks`` registered."""
    registered = Plugins()
    for hook in hooks:
        registered.manager.register(hook)
    config = CanaryConfig.load(stats_interval=1, read_check=-1)
    canary = Canary([engine.region()], config, hooks=registered.manager, writers=engine.writers)
    engine.step(canary, chunk)
    return canary


@pytest.mark.usefixtures("logs")
def test_hooks_bracket_the_forward_in_order(engine):
    """Attached comes before the first forward; pre_forward before the check, post_forward before the recording."""
    recorder = Recorder()
    run(engine, recorder)
    calls = [c for c in recorder.calls if c[0] != "event"]
    assert calls == [("attached", ("full",)), ("pre_forward", 1, False), ("post_forward", 1, False)]
    assert [c[1] for c in recorder.calls if c[0] == "event"] == ["attached", "coverage", "stats"]


@pytest.mark.parametrize("dismissed", [False, True])
def test_a_finding_reaches_plugins_unless_one_dismisses_it(dismissed, engine, logs):
    """A finding goes to canary_dismiss first; with a reason it becomes a ``dismissed`` event, else a violation."""
    recorder = Recorder()
    canary = run(engine, recorder, *([Vet()] if dismissed else []), chunk=4)
    engine.k[1][engine.requests[0].slots[2]] += 1
    engine.step(canary)
    canary.drain()
    assert [c for c in recorder.calls if c[0] == "violation"] == ([] if dismissed else [("violation", "BYTES")])
    told = [e for e in logs if e["event"] == ("dismissed" if dismissed else "violation")]
    assert [(e["source"], e.get("reason")) for e in told] == [("k.1", "the engine explains it" if dismissed else None)]


def test_a_raising_plugin_switches_the_canary_off_not_the_engine(engine, logs):
    """In log mode an exception of a plugin around a forward disables this Canary loudly; the forward goes on."""

    class Bad:
        @hookimpl
        def canary_pre_forward(self, canary, batch):
            raise RuntimeError("no such field")

    canary = run(engine, Bad())
    assert not canary.enabled
    (event,) = (e for e in logs if e["event"] == "disabled")
    assert event["log_level"] == "error"
    assert "no such field" in event["error"]


def test_events_name_the_model_and_the_rank(engine):
    """Where the settings name a model, each event of its canary does; else none has that field. So with ranks."""
    told = []

    class Listener:
        @hookimpl
        def canary_event(self, event):
            told.append((event.fields.get("model"), event.fields.get("rank")))

    for name, rank, expected in (("draft", 2, ("draft", 2)), ("", 1, (None, 1)), ("", 0, (None, None))):
        hooks = Plugins()
        hooks.manager.register(Listener())
        Canary([engine.region()], CanaryConfig.load(model=name, rank=rank, silence_s=0), hooks=hooks.manager)
        assert set(told) == {expected}
        told.clear()
