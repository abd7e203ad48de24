"""The scrub's budget, and what it says of itself."""

from dataclasses import replace

import pytest
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import CanaryConfig, ConfigError
from canary_core.config import ScrubBudget
from canary_core.ops.backends import torch_backend
from canary_core.records import Cursor
from canary_core.runtime import scrub


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("1%", ScrubBudget(share=0.01)),
        ("0.1 %", ScrubBudget(share=0.001)),
        ("64MiB", ScrubBudget(step_bytes=64 << 20)),
        ("1.5 gib", ScrubBudget(step_bytes=3 << 29)),
        ("1KB", ScrubBudget(step_bytes=1000)),
        ("7b", ScrubBudget(step_bytes=7)),
        (" 4096 ", ScrubBudget(step_bytes=4096)),
        ("0", ScrubBudget()),
    ],
)
def test_budgets_are_a_share_of_time_or_bytes(text, budget):
    """Both ways of saying how much the scrub may do are understood, and print as they were written."""
    read = CanaryConfig.load(scrub_budget=text).scrub_budget
    assert read == budget
    assert str(read) == text.strip()


@pytest.mark.parametrize("text", ["fast", "101%", "-1", "5 parsecs", "1% of it", "64MiB!", "1.", "", "%"])
def test_a_budget_that_is_none_is_refused_where_it_is_read(text):
    """A bad budget is refused with the other settings; the sentence names it and what was got."""
    with pytest.raises(ConfigError, match=r"^CANARY_SCRUB_BUDGET must be") as raised:
        CanaryConfig.load(scrub_budget=text)
    assert str(raised.value).endswith(repr(text))


def test_the_scrub_goes_round_and_says_how_often():
    """A budget in bytes passes as many slots after each forward, wraps around the pool, and is told as coverage."""
    per_step = 10
    region = ToyEngine().region()
    guarded = Guarded(scrub_budget=str(per_step * region.slot_bytes))
    canary = guarded.canary
    guarded.submit(tokens=32)
    for _ in range(20):
        guarded.step(chunk=2)
    canary.drain()
    passed = canary.stats()["scrubbed_slots"]
    assert passed == 20 * per_step
    assert canary.scrub_stats()["scrub_coverage"] == passed / region.slots
    assert canary.scrub_stats()["scrub_period_s"] > 0


@pytest.fixture
def pace(monkeypatch):
    """Gives a `Pace` over forwards of a length each, by a clock that only it moves."""
    now = [0.0]
    monkeypatch.setattr(scrub.time, "perf_counter", lambda: now[0])

    def paced(text, launch_s, forwards_s):
        made = scrub.Pace(ScrubBudget.parse(text), bytes_per_s=4e12, launch_s=launch_s)
        for forward_s in (0.0, *forwards_s):
            now[0] += forward_s
            made.step()
        return made

    return paced


def test_what_a_launch_costs_is_part_of_the_share(pace):
    """0.1 % of 8 ms is what a launch takes, so four forwards share a scrub, which spends a quarter on its launch and
    reads for the rest; told is what was asked for."""
    made = pace("0.1%", 8e-6, [8e-3] * 20)
    assert made.forwards == 4
    assert made.scrub_bytes(4) == pytest.approx(24e-6 * 4e12)
    told = made.achieved(made.scrub_bytes(4), 4, 73 * 10**9)
    assert told["scrub_share"] == pytest.approx(1e-3)
    assert told["scrub_period_s"] == pytest.approx(73e9 / 96e6 * 32e-3)


@pytest.mark.parametrize(
    ("text", "launch_s", "forwards"), [("1%", 8e-6, 1), ("64MiB", 8e-6, 1), ("0.1%", 0.0, 1), ("0.001%", 8e-6, 64)]
)
def test_forwards_share_a_scrub_only_where_its_launch_is_dear(pace, text, launch_s, forwards):
    """A large share, bytes after each forward, and a back end without launches: a scrub each; never more than 64."""
    assert pace(text, launch_s, [8e-3] * 20).forwards == forwards


def test_decode_steps_do_not_pay_for_a_prefill(pace):
    """The forward after a long one is no longer than those before."""
    made = pace("1%", 0.0, [8e-3] * 20 + [0.4])
    assert made.scrub_bytes(1) < 0.01 * 30e-3 * 4e12


@pytest.fixture
def clock(monkeypatch):
    """Moves the clock on by so many seconds; nothing else does."""
    now = [0.0]
    monkeypatch.setattr(scrub.time, "perf_counter", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


def test_an_idle_time_is_no_long_step(clock, guarded):
    """A share of the time is one of the forwards' time: after a pause the scrub does no more than before it."""
    guarded.submit(tokens=40)
    periods = []
    for step in range(12):
        if step == 6:
            for _ in range(20):
                clock(0.5)
                guarded.canary.step.end()
        clock(0.01)
        guarded.step(chunk=2)
        periods.append(guarded.canary.scrub_stats().get("scrub_period_s"))
    assert periods[0] is None
    assert periods[2:] == [pytest.approx(0.01)] * 10


def test_the_first_forward_is_scrubbed(guarded):
    """A graph may be captured before any step has ended: the scrub is in it."""
    assert all(stretch.slots > 0 for stretch in guarded.canary.step.scrub.stretches)


def test_forwards_take_turns_with_the_scrub(monkeypatch, guarded):
    """Where four forwards share a scrub it runs after every fourth, and with each one of a graph; each goes on where
    the last one ended."""
    monkeypatch.setattr(scrub.Pace, "forwards", 4)
    engine, state, backend, begins = guarded.engine, guarded.canary.states["full"], torch_backend(), []

    def noted(state):
        begins.append(int(state.cursors[Cursor.SCRUB]))
        backend.scrub(state)

    # Four forwards' budget is five slots.
    budget = ScrubBudget(step_bytes=5 * state.region.slot_bytes // 4)
    shared = scrub.Scrub([state], replace(backend, scrub=noted), budget)
    shared.adjust(captured=False)
    guarded.submit(tokens=32)
    for forward in range(11):
        batch = engine.batch(chunk=2)
        backend.check(state, batch, batch.tables["full"])
        engine.forward(batch)
        backend.record(state, batch, batch.tables["full"])
        shared.run(captured=forward >= 8)
    assert begins == [0, 5, 10, 15, 20]
    assert int(state.cursors[Cursor.SCRUB_NEXT]) == 25
