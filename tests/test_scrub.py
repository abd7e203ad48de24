"""The scrub's budget, and what it says of itself."""

from dataclasses import replace
from random import Random

import pytest
import torch
from support.guarded import Guarded
from support.toy import ToyEngine

from canary_core import CanaryConfig, ConfigError, Kind
from canary_core.config import ScrubBudget
from canary_core.guard import scrub
from canary_core.ops import state as region_state
from canary_core.ops.backends import torch_backend
from canary_core.records import Cursor, ScrubWord


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


def flip(engine, slot, layer=0):
    """A bit of a slot's K."""
    engine.k[layer].view(torch.int16)[slot, 5] ^= 1


def forwards_until_told(guarded, most=200):
    """Decodes until a finding of changed bytes is told; gives how many forwards that took, and takes the finding."""
    for forwards in range(1, most + 1):
        guarded.decode()
        if guarded.violations:
            (found,) = guarded.violations
            assert found.kind is Kind.BYTES
            guarded.violations.clear()
            return forwards
    raise AssertionError(f"not told within {most} forwards")


def serving(slots=256, budget_slots=4, tokens=40, **settings):
    """An engine with one request of so many tokens, its slots 1 to ``tokens``; a scrub compares ``budget_slots``."""
    engine = ToyEngine(slots=slots)
    engine.table = torch.zeros(16, slots, dtype=torch.int32)
    budget = str(budget_slots * engine.region().slot_bytes)
    guarded = Guarded(engine, **{"scrub_budget": budget, **settings})
    guarded.submit(tokens=tokens)
    guarded.step(chunk=tokens)
    return guarded


def test_a_scrub_compares_as_much_as_its_budget_says():
    """Once more is written than that, neither less nor more; how often it went round the pool is told."""
    guarded = serving(budget_slots=10)
    canary, region = guarded.canary, guarded.canary.regions["full"]
    before = canary.stats()["checked_bytes"]
    for _ in range(20):
        guarded.decode()
    canary.drain()
    assert canary.stats()["checked_bytes"] - before == 20 * 10 * region.slot_bytes
    assert canary.scrub_stats()["scrub_coverage"] == canary.stats()["scrubbed_slots"] / region.slots
    assert canary.scrub_stats()["scrub_coverage"] > 3


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_budget_beyond_a_list_gets_round_in_several_scrubs(monkeypatch, backend):
    """In a large pool a list has room for a part of the slots. Every one has its turn, the figures say what was done,
    and a check on demand has no bound."""
    monkeypatch.setattr(region_state, "LEAST_LISTED", 4)
    guarded = serving(budget_slots=256, backend=backend)
    canary, region, state = guarded.canary, guarded.canary.regions["full"], guarded.canary.states["full"]
    assert state.listed_slots == 256 // 16
    before = canary.stats()["checked_bytes"]
    for _ in range(6):
        guarded.decode()
    canary.drain()
    assert canary.stats()["checked_bytes"] - before == 6 * 16 * region.slot_bytes
    for slot in (2, 20, 40):
        flip(guarded.engine, slot)
        assert forwards_until_told(guarded) <= 5
        flip(guarded.engine, slot)
    flip(guarded.engine, 30)
    canary.slots.check("full", torch.arange(1, 41))
    canary.drain()
    assert [v.slot for v in guarded.violations] == [30]


def test_empty_slots_cost_nothing():
    """A pool of which little is written is compared as fast as a small one: 40 slots, 10 in each forward."""
    guarded = serving(slots=1000, budget_slots=10)
    guarded.decode()
    for slot in (1, 20, 40):
        flip(guarded.engine, slot)
        assert forwards_until_told(guarded) <= 6


def test_running_slots_come_before_parked_ones():
    """Of ten slots in each forward two thirds are of the request that runs, with 40 slots; 150 that the prefix cache
    keeps have the rest. A flip among either is told in the time of its round."""
    guarded = serving(slots=512, budget_slots=9, tokens=190)
    engine, slots = guarded.engine, torch.arange(41, 191)
    (request,) = engine.requests
    # Another request had the rest of the slots, and the cache keeps them.
    request.tokens, request.slots, request.cached = request.tokens[:40], request.slots[:40], 40
    guarded.canary.slots.park("full", slots)
    for slot in (3, 39):
        flip(engine, slot)
        assert forwards_until_told(guarded) <= 40 / 6 + 3
    for slot in (41, 190):
        flip(engine, slot)
        assert forwards_until_told(guarded) <= 150 / 3 + 3


def test_freed_slots_are_not_compared():
    """Nobody may read them, and an engine may put there what it likes."""
    guarded = serving(budget_slots=100)
    engine = guarded.engine
    (request,) = engine.requests
    request.tokens, request.slots, request.cached = request.tokens[:20], request.slots[:20], 20
    guarded.canary.slots.free("full", torch.arange(21, 41))
    guarded.decode()
    for slot in range(21, 41):
        flip(engine, slot)
    for _ in range(10):
        guarded.decode()
    assert guarded.violations == []


def test_without_events_all_that_was_written_is_live(guarded):
    """Slots of requests that ended are compared like those of running ones, as long as nobody tells that they are
    free."""
    guarded = serving(budget_slots=10)
    engine = guarded.engine
    engine.requests.clear()
    guarded.submit("b", tokens=3)
    guarded.decode()
    flip(engine, 20)
    assert forwards_until_told(guarded) <= 6


def test_the_live_period_is_a_bound(clock):
    """However far the scrub has come, and whichever slot it is: from the flip to the finding no more time goes by than
    ``live_period_s`` says, and two forwards: a list is made by the scrub before, and the request grows."""
    guarded = serving(slots=900, budget_slots=20, tokens=200)
    step_s = 0.01

    def decode():
        clock(step_s)
        guarded.decode()

    for _ in range(60):
        decode()
    random = Random(3)
    for slot in random.sample(range(1, 201), 25):
        flip(guarded.engine, slot)
        waited_s = 0.0
        while not guarded.violations:
            bound_s = guarded.canary.scrub_stats()["live_period_s"]
            decode()
            waited_s += step_s
            assert waited_s <= bound_s + 2.5 * step_s
        (found,) = guarded.violations
        assert (found.kind, found.slot) == (Kind.BYTES, slot)
        guarded.violations.clear()
        flip(guarded.engine, slot)
        for _ in range(random.randrange(5)):
            decode()


def test_a_small_pool_is_read_every_few_forwards():
    """With default settings, where a share of the time would be a slot a forward: 500 slots of which all are written
    are compared within eight forwards, four for the scrub that lists them."""
    guarded = serving(slots=500, tokens=480, scrub_budget=CanaryConfig().scrub_budget)
    for slot in (1, 240, 480):
        flip(guarded.engine, slot)
        assert forwards_until_told(guarded) <= 8


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
    """0.1 % of 8 ms is what a launch takes, so sixteen forwards share a scrub, which spends a sixteenth on its launch
    and reads for the rest; told is what was asked for."""
    made = pace("0.1%", 8e-6, [8e-3] * 20)
    assert made.forwards == 16
    assert made.scrub_bytes(16) == pytest.approx(120e-6 * 4e12)
    assert made.share(made.scrub_bytes(16), 16) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("text", "launch_s", "forwards"), [("2%", 8e-6, 1), ("64MiB", 8e-6, 1), ("0.1%", 0.0, 4), ("0.001%", 8e-6, 64)]
)
def test_forwards_share_a_scrub_where_its_launch_is_dear(pace, text, launch_s, forwards):
    """A large share, and bytes after each forward: a scrub each. On a CPU, without launches, four; never more than
    64."""
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


def test_an_idle_time_is_no_long_step(clock):
    """A share of the time is one of the forwards' time, and a round takes as long as its forwards: after a pause the
    scrub does no more than before it, and its round is no longer."""
    guarded = serving(slots=64, tokens=20, budget_slots=64)
    periods = []
    for step in range(12):
        if step == 6:
            for _ in range(20):
                clock(0.5)
                guarded.canary.step.end()
        clock(0.01)
        guarded.decode()
        periods.append(guarded.canary.scrub_stats().get("scrub_period_s"))
    assert periods[2:] == [pytest.approx(0.01)] * 10


def test_the_first_forward_is_scrubbed(guarded):
    """A graph may be captured before any step has ended: the scrub is in it."""
    assert all(stretch.slots > 0 for stretch in guarded.canary.step.scrub.stretches)


def test_forwards_take_turns_with_the_scrub(monkeypatch, guarded):
    """Where four forwards share a scrub it runs after every fourth, and with each one of a graph; each goes on where
    the last one ended."""
    monkeypatch.setattr(scrub.Pace, "forwards", 4)
    engine, state, backend, begins = guarded.engine, guarded.canary.states["full"], torch_backend(), []

    def noted(state, probed):
        begins.append(int(state.cursors[Cursor.SCRUB + ScrubWord.RUNNING_LISTED]))
        backend.scrub(state, probed)

    # Four forwards' budget is five slots.
    budget = ScrubBudget(step_bytes=5 * state.region.slot_bytes // 4)
    shared = scrub.Scrub([state], replace(backend, scrub=noted), budget)
    shared.adjust(captured=False)
    guarded.submit(tokens=32)
    for forward in range(11):
        batch = engine.batch(chunk=20 if forward == 0 else 1)
        backend.check(state, batch, batch.tables["full"])
        engine.forward(batch)
        backend.record(state, batch, batch.tables["full"])
        shared.run(captured=forward >= 8)
    assert begins == [0, 5, 10, 15, 20]
    assert int(state.cursors[Cursor.SCRUB_NEXT + ScrubWord.RUNNING_LISTED]) == 25


@pytest.mark.parametrize(
    ("running", "parked", "between_s", "share"),
    [
        pytest.param(45, 15, 9.0, 0.75, id="as many as they are, where that is more than two thirds"),
        pytest.param(20, 40, 9.0, 2 / 3, id="two thirds"),
        pytest.param(60, 0, 9.0, 7 / 8, id="parked ones are looked for all the same"),
        pytest.param(10, 50, 0.5, 0.05, id="no more than it takes to compare all of them once a second"),
    ],
)
def test_to_come_first_is_never_to_come_later(guarded, running, parked, between_s, share):
    """The share of a scrub that running slots have before parked ones, by what the last round found."""
    state = guarded.canary.states["full"]
    stretch, slots = scrub.Stretch(state), state.region.slots
    stretch.resize(100)
    stretch.slots = 100
    assert stretch.running_share(between_s) == 2 / 3
    stretch.progress.add(0.0, [0, 0, 0, 0])
    stretch.progress.add(4.0, [slots, running, slots, parked])
    assert stretch.running_share(between_s) == pytest.approx(share)
