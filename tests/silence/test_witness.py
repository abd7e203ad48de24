"""`Witness`: what an engine says it computed against what was recorded. `tests/silence/test_blindness.py` has it in an
engine."""

import gc

import pytest

from canary_core import Witness


class Clock:
    """A witness that is looked at every second of a pretended time; what it told."""

    def __init__(self) -> None:
        self.witness = Witness()
        self.now = 0.0
        self.calls = 0
        self.told: list[int] = []
        self.witness.calls = lambda: self.calls

    def run(self, seconds: int, computed: int, recorded: int, *, reads: bool = True, called: bool = True) -> None:
        """So many tokens in each second."""
        for _ in range(seconds):
            self.now += 1
            self.calls += called
            self.witness.computed(computed)
            if reads:
                self.witness.recorded(recorded)
            event = self.witness.look(self.now)
            if event is not None:
                assert (event.name, event.level) == ("unguarded_tokens", "warning")
                self.told.append(event.fields["missing_tokens"])


@pytest.fixture
def clock() -> Clock:
    """A fresh one."""
    return Clock()


def test_what_is_recorded_is_not_missing(clock):
    """Nothing is told, and the ratio is 1."""
    clock.run(120, 50, 50)
    assert (clock.told, clock.witness.ratio, clock.witness.missing) == ([], 1.0, 0)


def test_an_engine_that_tells_nothing_is_not_judged(clock):
    """There is no figure, so no ratio and nothing in the stats."""
    clock.run(120, 0, 50)
    assert (clock.told, clock.witness.ratio, clock.witness.stats()) == ([], None, {})


@pytest.mark.parametrize(("reads", "called"), [(True, True), (False, False)], ids=["some forwards", "all forwards"])
def test_what_is_missing_is_told_within_a_minute(clock, reads, called):
    """Where a share of the forwards is not seen, and where no hook is called any more from some moment on."""
    clock.run(60, 50, 50)
    began = clock.now
    while not clock.told and clock.now - began < 120:
        clock.run(1, 50, 40 if reads else 0, reads=reads, called=called)
    assert clock.told
    assert clock.now - began <= 60


def test_what_goes_on_is_told_as_it_grows(clock):
    """Not every second: again when a thousandth of what was computed since is missing, and at least sixteen tokens."""
    clock.run(500, 50, 49)
    assert clock.told == sorted(set(clock.told))
    assert 3 <= len(clock.told) <= 500 / 16
    before = len(clock.told)
    clock.run(120, 50, 50)
    assert len(clock.told) <= before + 1, "what was missing before is not told again"


def test_an_engine_that_idles_is_not_accused(clock):
    """What it computed last is read with its next forward: the tokens in between are nobody's fault, for however
    long, and with one forward alone."""
    clock.run(60, 50, 50)
    clock.witness.computed(200)
    clock.run(300, 0, 0, reads=False, called=False)
    clock.witness.computed(1)
    clock.run(300, 0, 0, reads=False, called=False)
    assert clock.told == []
    clock.witness.recorded(201)
    clock.run(60, 50, 50)
    assert clock.told == []


def test_a_schedule_that_runs_ahead_is_not_accused(clock):
    """An engine tells of tokens two steps before their forward is read."""
    clock.witness.computed(100)
    clock.run(120, 50, 50)
    assert clock.told == []


def test_known_reasons_are_counted_and_not_told(clock):
    """By reason, in the stats."""
    for _ in range(120):
        clock.witness.explain("no_cache", 10)
        clock.run(1, 50, 40)
    assert clock.told == []
    assert clock.witness.stats() == {
        "computed_tokens": 6000,
        "guarded_tokens": 4800,
        "guarded_ratio": 0.8,
        "unguarded_no_cache_tokens": 1200,
    }


def test_what_passes_while_a_guard_is_off_is_explained(clock):
    """As the reason that `why` gives; forwards around it count to it, too."""
    why = [None]
    clock.witness.why = lambda: why[0]
    clock.run(60, 50, 50)
    why[0] = "paused"
    clock.run(60, 50, 0, called=False)
    why[0] = None
    clock.witness.computed(70)
    clock.run(120, 50, 50)
    assert clock.told == []
    assert clock.witness.explained == {"paused": 3000, "around_a_pause": 70}
    assert clock.witness.guarded_tokens == clock.witness.computed_tokens - 3070


def test_a_counter_of_the_engine_is_followed_from_now_on(clock):
    """What it had before does not count; what it grows by does, whoever asks first."""
    counter = [1000]
    clock.witness.follow(lambda: counter[0])
    counter[0] += 70
    assert (clock.witness.computed_tokens, clock.witness.missing) == (70, 70)
    counter[0] += 30
    assert clock.witness.stats()["computed_tokens"] == 100


def test_those_who_share_it_report_each_token_once():
    """The first one reports all, and after its end the next one what came since."""

    class Guard:
        pass

    witness, first, second = Witness(), Guard(), Guard()
    witness.computed(5)
    assert (witness.share(first), witness.share(second)) == ((5, 0), (0, 0))
    witness.recorded(5)
    assert witness.share(first) == (5, 5)
    witness.hand_over(first)
    witness.computed(2)
    assert witness.share(second) == (2, 0)
    del second
    gc.collect()
    witness.computed(1)
    assert witness.share(Guard()) == (1, 0)
