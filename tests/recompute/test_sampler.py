"""Which requests ``CANARY_RECOMPUTE`` picks, and when; its share of the time holds, on a clock of its own."""

import random

import pytest
import torch

from canary_core import (
    CachedRequest,
    Canary,
    CanaryConfig,
    CanaryError,
    Computed,
    KVSource,
    Outline,
    Recompute,
    Recomputer,
    Region,
    Touch,
)
from canary_core.plugins import private_hooks
from canary_core.testing import Findings

SLOTS, DIM, ROW = 256, 8, 32


class Engine(Recomputer):
    """Requests of one layer, whose KV is a function of the token. ``now``: the time, which goes on by ``cost_s`` with
    each forward of a recompute."""

    rounding = 1e-7

    def __init__(self) -> None:
        self.now, self.cost_s = 0.0, 0.01
        self.busy = False
        self.error: Exception | None = None
        self.computed: list[str] = []
        self.slots: dict[str, torch.Tensor] = {}
        self.touches: dict[str, list[Touch]] = {}
        self.pool = torch.zeros(SLOTS, DIM)
        self.free = list(range(SLOTS))

    def grow(self, name: str, tokens: int) -> None:
        """So many more tokens of a request."""
        new = torch.tensor([self.free.pop() for _ in range(tokens)])
        self.slots[name] = torch.cat([self.slots.get(name, new[:0]), new])
        self.pool[self.slots[name]] = self.kv(len(self.slots[name]))

    def kv(self, tokens: int) -> torch.Tensor:
        """What the model computes."""
        return torch.arange(1, tokens + 1)[:, None] * torch.linspace(1, 2, DIM)

    def clock(self) -> float:
        """Seconds."""
        return self.now

    @property
    def pressed(self) -> bool:
        return self.busy

    def requests(self) -> list[str]:
        return list(self.slots)

    def cached(self, request: str) -> CachedRequest:
        slots = self.slots[request]
        return CachedRequest(request, range(len(slots)), {"kv": slots}, self.touches.get(request, ()))

    def compute(self, request, chunk_tokens, jitter=0.0):
        if self.error is not None:
            raise self.error
        self.computed.append(request.request)
        self.now += self.cost_s
        values = self.kv(len(request.tokens))
        values *= 1 + jitter * torch.rand(values.shape)
        return {"kv": Computed((source(values),), torch.arange(len(values)))}


def source(values: torch.Tensor) -> KVSource:
    """Rows of one layer's K."""
    return KVSource(values, "k", 0, chunk_bytes=ROW, slot_stride_bytes=ROW, dtype=torch.float32)


class Sampled:
    """An engine with a Canary and its recompute."""

    def __init__(self, recompute: str) -> None:
        self.engine, self.findings = Engine(), Findings()
        config = CanaryConfig.load(mode="log", silence_s=0, bytes="off", recompute=recompute)
        region = Region("kv", SLOTS, (source(self.engine.pool),))
        self.canary = Canary([region], config, hooks=private_hooks(self.findings))
        self.recompute = Recompute(self.canary, self.engine, clock=self.engine.clock)

    def taught(self) -> None:
        """Noise is known, from requests that have gone."""
        for n in range(8):
            self.engine.grow(f"fresh {n}", 64)
            self.recompute.now(f"fresh {n}")
            self.engine.free += self.engine.slots.pop(f"fresh {n}").tolist()
        assert self.recompute.noise.known
        self.engine.computed.clear()

    def steps(self, count: int, seconds: float = 0.01) -> None:
        """So many turns of the engine's loop, of so many seconds each."""
        for _ in range(count):
            self.engine.now += seconds
            self.recompute.serve()


@pytest.fixture
def sampled():
    """Makes one with this setting."""
    made = []

    def make(setting: str) -> Sampled:
        made.append(Sampled(setting))
        return made[-1]

    yield make
    for one in made:
        one.canary.close()


@pytest.mark.parametrize(("setting", "share"), [("1%", 0.01), ("10%", 0.1)])
def test_the_share_of_the_time_holds(setting, share, sampled):
    """Within a tenth, while there is always something to do; learning counts as well."""
    one = sampled(setting)
    for turn in range(2000):
        one.engine.slots.clear()
        one.engine.free = list(range(SLOTS))
        one.engine.grow(f"{turn}", 40)
        one.steps(5)
    spent = one.engine.cost_s * len(one.engine.computed)
    assert 0.9 * share < spent / one.engine.now < 1.05 * share
    assert one.canary.stats()["recompute_same"] > 50
    assert abs(one.canary.stats()["recompute_ms"] - 1000 * spent) < 1


def test_others_spend_from_the_same_share(sampled):
    """As proofs of parked prefixes do: all together is the share, within a tenth."""
    one, others, draw = sampled("10%"), 0.0, random.Random(1)
    for turn in range(1000):
        one.engine.slots.clear()
        one.engine.free = list(range(SLOTS))
        one.engine.grow(f"{turn}", 40)
        if draw.random() < 0.5:
            one.steps(5)
            continue
        one.engine.now += 0.05
        if not one.recompute.budget.rests:
            one.engine.now += 0.02
            one.recompute.budget.spent(0.02)
            others += 0.02
    own = one.engine.cost_s * len(one.engine.computed)
    assert min(own, others) > 0.5
    assert 0.09 < (own + others) / one.engine.now < 0.11


def test_what_was_touched_comes_first_then_what_has_most_to_look_at(sampled):
    """A request comes again with twice as many tokens, and never one that is too short."""
    one = sampled("100%")
    one.taught()
    one.engine.grow("short", 20)
    one.engine.grow("own", 60)
    one.engine.grow("hit", 34)
    one.engine.touches["hit"] = [Touch("hit", 16)]
    one.steps(50)
    assert one.engine.computed == ["hit", "own"]
    one.engine.grow("hit", 30)
    one.steps(50)
    assert one.engine.computed == ["hit", "own"]
    one.engine.grow("hit", 4)
    one.steps(50)
    assert one.engine.computed == ["hit", "own", "hit"]


def test_noise_is_rather_learnt_from_untouched_requests(sampled):
    """Until it is known these come first, as they have been through the engine's own path."""
    one = sampled("100%")
    one.engine.grow("hit", 40)
    one.engine.touches["hit"] = [Touch("hit", 16)]
    one.engine.grow("own", 34)
    one.steps(50)
    assert list(dict.fromkeys(one.engine.computed)) == ["own", "hit"]


def test_a_server_in_which_each_request_has_a_hit_gets_verdicts(sampled):
    """Noise is learnt from these, and nobody starves."""
    one = sampled("100%")
    for n in range(8):
        one.engine.grow(f"{n}", 64)
        one.engine.touches[f"{n}"] = [Touch("hit", 16)]
        one.steps(50)
        one.engine.free += one.engine.slots.pop(f"{n}").tolist()
    stats = one.canary.stats()
    assert (stats["recompute_taught"], stats["recompute_same"]) == (4, 8)
    assert one.findings.told("recompute_starved") == []


def test_it_gives_way_to_those_who_wait_but_not_for_ever(sampled):
    """At once; after half a minute of that one request is looked at, so that a full server is not blind. Counted."""
    one = sampled("50%")
    one.taught()
    one.engine.busy = True
    one.engine.grow("a", 40)
    one.steps(290, seconds=0.1)
    assert one.engine.computed == []
    assert one.canary.stats()["recompute_gave_way"] > 200
    one.steps(20, seconds=0.1)
    assert one.engine.computed == ["a"]
    one.engine.grow("a", 50)
    one.steps(200, seconds=0.1)
    assert one.engine.computed == ["a"]
    one.engine.busy = False
    one.steps(5, seconds=0.1)
    assert one.engine.computed == ["a", "a"]


def test_so_many_verdicts_and_no_more(sampled):
    """Without a share of the time: at any price, and then at none."""
    one = sampled("3")
    one.taught()
    for n in range(6):
        one.engine.grow(f"{n}", 32)
    one.steps(100, seconds=0.001)
    assert len(one.engine.computed) == 3
    assert one.recompute._sampler.over


def test_a_search_that_finds_nothing_for_long_is_told(sampled):
    """Where no request is long enough: once, and counted. Not where all was looked at before."""
    one = sampled("100%")
    one.taught()
    one.engine.grow("seen", 40)
    one.steps(400, seconds=0.1)
    assert one.findings.told("recompute_starved") == []
    one.engine.grow("a", 20)
    one.steps(600, seconds=0.1)
    (told,) = one.findings.told("recompute_starved")
    assert "fewer than 32" in told.fields["reason"]
    assert one.canary.stats()["recompute_starved"] >= told.fields["looks"] == 250


def test_off_by_default(sampled):
    """Nothing is picked, and nothing looked for; `verify` works."""
    one = sampled("0")
    one.taught()
    one.engine.grow("a", 40)
    one.steps(100)
    assert one.engine.computed == []
    asked = one.canary.verifier.ask("a")
    one.steps(1)
    assert [answer.verdict for answer in asked.result(0)] == ["same"]


def test_what_can_not_be_computed_is_counted_by_reason(sampled):
    """A refusal is told once and tried again; an unknown error three times in a row, then it is off, and says so."""
    one = sampled("100%")
    one.engine.grow("a", 40)
    one.engine.error = CanaryError("the model runs on ranks")
    one.steps(5)
    assert one.canary.stats()["recompute_refused"] == 1
    (told,) = one.findings.told("unjudged")
    assert told.fields["reason"] == "the model runs on ranks"
    one.engine.error = torch.OutOfMemoryError("no")
    one.engine.grow("b", 40)
    one.steps(20)
    assert one.canary.stats()["recompute_no_memory"] == 1
    one.engine.error = RuntimeError("no kernel image")
    for n in range(4):
        one.engine.grow(f"c{n}", 33)
        one.steps(20)
    assert one.canary.stats()["recompute_failed"] == 3
    (off,) = one.findings.told("recompute_off")
    assert "3 times in a row" in off.fields["reason"]


def test_an_engine_that_idles_before_its_first_request_keeps_its_recompute(sampled, monkeypatch):
    """As long as no request has KV nothing is known of the model, and nobody asks: no failure, and nothing is told."""
    one = sampled("100%")

    def no_forward(engine: Engine) -> float:
        if not engine.slots:
            raise CanaryError("no forward has run yet, so there is nothing to compare")
        return 1e-7

    monkeypatch.setattr(Engine, "rounding", property(no_forward))
    one.steps(400)
    stats = one.canary.stats()
    assert [name for name in stats if name.startswith("recompute")] == []
    assert one.findings.told("unjudged") == one.findings.told("recompute_off") == []
    one.engine.grow("a", 40)
    one.steps(50)
    assert one.engine.computed[0] == "a"
    assert one.recompute.noise.requests == 1


def test_changed_kv_is_found_without_being_asked_for(sampled):
    """By the next look at the request."""
    one = sampled("5%")
    one.taught()
    one.engine.grow("a", 50)
    one.engine.pool[one.engine.slots["a"]] *= 1.01
    one.steps(200)
    (found,) = one.findings.violations
    assert (found.request, found.rule) == ("a", "everywhere")
    assert one.canary.stats()["recompute_differs"] == 1


def test_a_name_that_comes_again_is_another_request():
    """With fewer tokens than were looked at."""
    from canary_core.config.values import RecomputeShare
    from canary_core.watchers.recompute.sampler import Sampler

    sampler = Sampler(RecomputeShare.parse("100%"), lambda: 0.0)
    sampler.looked_at("a", 100, 0.0, verdict=True)
    assert sampler.pick([("a", Outline(150, False))], fresh=False) is None
    assert sampler.pick([("a", Outline(40, False))], fresh=False) == "a"


@pytest.mark.parametrize("text", ["1", "0", "0.5%", "100%", " 8 "])
def test_settings_print_as_written(text):
    """And are read again."""
    setting = CanaryConfig.load(recompute=text).recompute
    assert str(setting) == text.strip()
    assert bool(setting) is (text != "0")


@pytest.mark.parametrize("text", ["101%", "-1", "1 MiB", "half", ""])
def test_bad_settings_are_refused(text):
    """In a sentence."""
    with pytest.raises(CanaryError, match="CANARY_RECOMPUTE must be a share of time"):
        CanaryConfig.load(recompute=text)
