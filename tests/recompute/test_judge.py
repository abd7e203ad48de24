"""Requests that an engine has computed again in slots of the same pool, judged by pairs alone."""

from dataclasses import replace

import pytest
import torch

from canary_core import (
    CachedRequest,
    Canary,
    CanaryConfig,
    Computed,
    Kind,
    KVSource,
    RecomputeJudge,
    Region,
    RegionKind,
    Role,
    Touch,
    Verification,
)
from canary_core.plugins import private_hooks
from canary_core.testing import Findings
from canary_core.watchers.recompute.noise import EQUAL_REQUESTS, PAIRED_REQUESTS

LAYERS, SLOTS, DIM, TOKENS = 4, 512, 16, 160
NOISE = 0.01
ROUNDING = torch.finfo(torch.float32).eps / 2


class Pool:
    """Layers of K under a Canary; `request` writes one, and the same with noise behind layer 0 into other slots."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(7)
        self.tensors = [torch.zeros(SLOTS, DIM) for _ in range(LAYERS)]
        row = DIM * 4
        sources = tuple(
            KVSource(tensor, "k", layer, chunk_bytes=row, slot_stride_bytes=row, dtype=torch.float32)
            for layer, tensor in enumerate(self.tensors)
        )
        self.region = Region("kv", SLOTS, sources)
        self.findings = Findings()
        config = CanaryConfig.load(mode="log", silence_s=0, bytes="off")
        self.canary = Canary(self.regions(), config, hooks=private_hooks(self.findings))
        self.judge = RecomputeJudge(self.canary, lambda: ROUNDING)

    def regions(self) -> list[Region]:
        """Of the Canary."""
        return [self.region]

    def request(self, name: str, noise: float = NOISE, touches: tuple[Touch, ...] = ()) -> "tuple[CachedRequest, dict]":
        """Both sides of a request, at random slots."""
        own, other = torch.randperm(SLOTS, generator=self.random)[: 2 * TOKENS].split(TOKENS)
        for layer, tensor in enumerate(self.tensors):
            tensor[own] = torch.randn(TOKENS, DIM, generator=self.random)
            error = 1 + noise * torch.randn(TOKENS, DIM, generator=self.random) if layer else 1
            tensor[other] = tensor[own] * error
        self.own = own
        cached = CachedRequest(name, list(range(TOKENS)), {"kv": own}, touches)
        return cached, {"kv": Computed.within(self.region, other)}

    def taught(self) -> None:
        """The noise is known."""
        for n in range(8):
            answer = self.judge.judge(*self.request(f"fresh {n}"))
            assert answer.verdict == "unjudged"
            assert "not known yet" in answer.reason
        assert self.judge.noise.known


@pytest.fixture
def pool():
    """One for each test."""
    made = Pool()
    yield made
    made.canary.close()


def test_who_waits_for_the_noise_hears_how_far_it_is(pool):
    """By the answer, with numbers; the event has none, so that it is told once. A hit teaches nothing, and that is
    said."""
    reasons = [pool.judge.judge(*pool.request(f"fresh {n}")).reason for n in range(2)]
    hit, computed = pool.request("hit", touches=(Touch("hit", 64),))
    reasons += [pool.judge.judge(hit, computed).reason for _ in range(2)]
    (told,) = pool.findings.told("unjudged")
    assert [reason.removeprefix(told.fields["reason"]) for reason in reasons] == [
        "; so far taught by no request",
        "; so far taught by 1 of 8 requests with 160 of 1024 tokens",
        *["; so far taught by 2 of 8 requests with 320 of 1024 tokens; this one had a hit and teaches nothing"] * 2,
    ]


def test_pairs_teach_and_judge(pool):
    """Noise like that of the pairs is the same; more of it, from a position of one layer on, is found there."""
    pool.taught()
    assert pool.judge.judge(*pool.request("clean")).verdict == "same"
    cached, computed = pool.request("broken")
    pool.tensors[2][pool.own[64:]] *= 1.2
    answer = pool.judge.judge(cached, computed)
    (found,) = pool.findings.violations
    assert (answer.verdict, found.kind, found.rule, found.layer) == ("differs", Kind.RECOMPUTE, "attention", 2)
    assert found.position == 64
    assert found.slot == int(pool.own[64])
    assert answer.finding == found.explanation
    assert pool.canary.stats()["recomputed_requests"] == 10


@pytest.mark.parametrize(
    ("touches", "verdict"),
    [((Touch("arrival", 160),), "unjudged"), ((Touch("hit", 32),), "unjudged"), ((), "differs")],
)
def test_where_others_store_too_only_a_request_that_computed_all_itself_differs(pool, touches, verdict):
    """A hit may be of what an origin brought that turned out to be shared; what is the same is the same."""
    pool.taught()
    pool.judge.shared = lambda: ["HostStore"]
    for broken in (False, True):
        cached, computed = pool.request("request", touches=touches)
        pool.tensors[1][pool.own[64:]] *= 1 + broken
        answer = pool.judge.judge(cached, computed)
        assert answer.verdict == (verdict if broken else "same")
    assert ("HostStore's, where others store, too" in (answer.reason or "")) == (verdict == "unjudged")
    assert len(pool.findings.violations) == (verdict == "differs")


@pytest.mark.parametrize(("garbage", "tokens"), [(-1.0, 24), (float("inf"), 24), (-1.0, 1)])
def test_garbage_of_fresh_requests_is_no_noise(garbage, tokens, pool):
    """Half of the requests that teach have garbage in layer 2, as from a kernel that goes wrong from the start. Noise
    is that of all else, and garbage is found once it is known. A request with as much as would be a verdict teaches
    nothing, and that is told; single tokens are left out."""
    for n in range(16):
        cached, computed = pool.request(f"fresh {n}")
        if n % 2:
            pool.tensors[2][pool.own[40 : 40 + tokens]] *= garbage
        pool.judge.judge(cached, computed)
    assert pool.judge.noise.known
    assert max(pool.judge.noise.bound("kv", source).window for source in pool.region.sources) < 10 * NOISE
    told = [event.fields for event in pool.findings.told("unjudged") if "unrelated tokens" in event.fields["reason"]]
    window = [("fresh 1", "k.2", 40)] if tokens > 1 else []
    assert [(one["request"], one["source"], one["position"]) for one in told] == window
    assert pool.canary.stats().get("recompute_unlike", 0) == (7 if window else 0)
    found = len(pool.findings.violations)
    cached, computed = pool.request("broken")
    pool.tensors[2][pool.own[40:72]] *= -1
    assert pool.judge.judge(cached, computed).verdict == "differs"
    assert [(v.layer, v.position) for v in pool.findings.violations[found:]] == [(2, 40)]


def scattered(pool: Pool, count: int, first: int = 48) -> str:
    """The verdict on a request of which so many tokens of 32, every third one from ``first`` on, have another sign in
    layer 2."""
    cached, computed = pool.request(f"broken {count}")
    pool.tensors[2][pool.own[first : first + 3 * count : 3]] *= -1
    return pool.judge.judge(cached, computed).verdict


def test_a_quarter_of_a_window_is_a_verdict(pool):
    """Eight of 32 tokens far above what a single one is off by, between others that are right; seven are not. Said is
    the error of the quarter, and the bound that it is above; medians are as of noise."""
    pool.taught()
    assert scattered(pool, 7) == "same"
    assert scattered(pool, 8) == "differs"
    (found,) = pool.findings.violations
    assert (found.rule, found.layer, found.position) == ("attention", 2, 48)
    assert "by 2 of its size in a quarter of 32 tokens or more, where noise is at most 0.0" in found.explanation
    cached, computed = pool.request("everywhere")
    pool.tensors[2][pool.own[::3]] *= -1
    answer = pool.judge.judge(cached, computed)
    assert [one.by_quarter for one in answer.layers] == [False, False, True, False]
    assert answer.layers[2].worst < answer.layers[2].bound <= answer.layers[2].quarter_bound < 0.1
    assert "a quarter 2 and more, noise up to 0.0" in answer.table()
    cached, computed = pool.request("thinner before")
    pool.tensors[2][pool.own[torch.tensor([5, 40, *range(70, 90, 2)])]] *= -1
    assert pool.judge.judge(cached, computed).verdict == "differs"
    assert [v.position for v in pool.findings.violations] == [48, 0, 5]
    assert pool.findings.violations[-1].rule == "attention"
    assert Verification.from_dict(answer.to_dict()).layers[2].by_quarter


class Halves(Pool):
    """Layer 0 of K and V, then one of K alone and another one of both."""

    def __init__(self) -> None:
        super().__init__()
        halves = [("k", 0), ("v", 0), ("k", 1), ("v", 1)]
        sources = tuple(
            replace(source, half=half, layer=layer)
            for source, (half, layer) in zip(self.region.sources, halves, strict=True)
        )
        self.region = Region("kv", SLOTS, sources)
        self.canary.close()
        self.canary = Canary(self.regions(), self.canary.config, hooks=private_hooks(self.findings))
        self.judge = RecomputeJudge(self.canary, lambda: ROUNDING)


@pytest.mark.parametrize(
    ("broken", "rule"), [((2,), "half"), ((3,), "half"), ((0,), "half"), ((2, 3), "attention"), ((0, 1), "input")]
)
def test_one_of_k_and_v_alone_is_not_attentions_fault(broken, rule):
    """Nor that of the layer's input. Where both are wrong, it is."""
    pool = Halves()
    pool.taught()
    cached, computed = pool.request("broken")
    for n in broken:
        pool.tensors[n][pool.own[64:]] *= 1.3
    assert pool.judge.judge(cached, computed).verdict == "differs"
    (found,) = pool.findings.violations
    assert (found.rule, found.position, found.layer) == (rule, 64, broken[0] // 2)
    pool.canary.drain()
    (incident,) = pool.canary.incidents
    assert incident.diagnoses[0].name == f"other_{rule}"
    assert ("from a right input" in found.explanation) == (rule == "half")
    pool.canary.close()


def test_half_that_is_hardly_more_off_than_the_other_is_not_taken_for_it_alone():
    """V may be wrong as well, just below its bound."""
    pool = Halves()
    pool.taught()
    cached, computed = pool.request("broken")
    pool.tensors[2][pool.own[64:]] *= 1.08
    pool.tensors[3][pool.own[64:]] *= 1.03
    assert pool.judge.judge(cached, computed).verdict == "differs"
    assert [v.rule for v in pool.findings.violations] == ["attention"]
    pool.canary.close()


@pytest.mark.parametrize(("again", "rule"), [(False, "weights"), (True, "everywhere")])
def test_weights_that_were_changed_since_the_request_began_are_told(again, rule, pool):
    """How, and after which step; not of a request that began, or was computed again, later."""
    pool.taught()
    cached, computed = pool.request("older")
    pool.canary.writers.id("older")
    pool.canary.step.weights_changed("update_weights_from_disk", since=12)
    if again:
        pool.canary.writers.again("older")
    pool.tensors[1][pool.own] *= 1.3
    assert pool.judge.judge(cached, computed).verdict == "differs"
    (found,) = pool.findings.violations
    said = "the weights were changed since it began (weights_changed 1, by update_weights_from_disk, after step 12)"
    assert (found.rule, said in found.explanation) == (rule, not again)
    pool.canary.drain()
    (incident,) = pool.canary.incidents
    assert incident.diagnoses[0].name == ("other_weights" if again else "changed_weights")


def test_where_single_tokens_were_unlike_medians_alone_are_judged(pool):
    """As where rounding sends a token to another expert: from that layer on. Layers before it are judged as ever."""
    for n in range(8):
        cached, computed = pool.request(f"fresh {n}")
        if n == 3:
            pool.tensors[2][pool.own[40]] *= -1
        pool.judge.judge(cached, computed)
    assert scattered(pool, 12) == "same"
    cached, computed = pool.request("clean")
    layers = pool.judge.judge(cached, computed).layers
    assert [one.quarter_bound is None for one in layers] == [False, False, True, True]
    pool.tensors[1][pool.own[::4]] *= -1
    assert pool.judge.judge(cached, computed).verdict == "differs"
    assert [(v.layer, v.position) for v in pool.findings.violations] == [(1, 0)]


class Recurrent(Pool):
    """Beside the layers a region of states: errors of a decode are as large as there were decodes before it."""

    def regions(self) -> list[Region]:
        state = KVSource(torch.zeros(4, 64), "ssm", 0, chunk_bytes=256, slot_stride_bytes=256, role=Role.STATE)
        return [self.region, Region("state", 4, (state,), kind=RegionKind.STATE)]

    def verify(self, name: str, decoded: int | None, noise: float = NOISE, factor: float = 1.0) -> str:
        """The verdict on a request whose last tokens were ``decoded``. ``factor``: of the keys of the last 70 in layer
        2, in the cache."""
        cached, computed = self.request(name, noise=0.0)
        other, decodes = computed["kv"].slots, TOKENS if decoded is None else decoded
        grown = torch.cat([torch.zeros(TOKENS - decodes), torch.arange(1.0, decodes + 1) / TOKENS])[:, None]
        for tensor in self.tensors[1:]:
            tensor[other] *= 1 + noise * grown * torch.randn(TOKENS, DIM, generator=self.random)
        self.tensors[2][self.own[-70:]] *= factor
        return self.judge.finish(cached, self.judge.begin(cached, computed).result(), True, decoded).verdict


def test_noise_of_states_is_known_as_far_as_requests_have_decoded():
    """What has decoded more than eight fresh requests is judged up to there, and teaches; then all of it is judged."""
    pool = Recurrent()
    for n in range(8):
        assert pool.verify(f"short {n}", 40) == "unjudged"
    assert pool.verify("short", 40) == "same"
    assert [pool.verify(f"long {n}", 150) for n in range(8)] == ["unjudged"] * 8
    assert [pool.verify(f"longer {n}", 150) for n in range(4)] == ["same"] * 4
    assert pool.verify("parked, with decodes that nobody counted", None) == "unjudged"
    assert pool.findings.violations == []
    assert pool.verify("broken", 150, factor=1.5) == "differs"
    assert pool.verify("broken early, decoded for long", 160, factor=1.5) == "differs"
    told = [event.fields["reason"] for event in pool.findings.told("unjudged")]
    assert [("not known yet" in reason, "of recurrent states" in reason) for reason in told] == [
        (True, False), (False, True),
    ]  # fmt: skip
    pool.canary.close()


def test_a_fault_among_the_first_decodes_of_a_long_request_is_found():
    """The noise of these is known."""
    pool = Recurrent()
    for n in range(9):
        pool.verify(f"short {n}", 60)
    assert pool.verify("broken", 90, factor=2.0) == "differs"
    assert pool.canary.stats()["recompute_differs"] == 1
    pool.canary.close()


def test_without_states_decodes_of_any_number_are_judged():
    """Attention keeps no errors."""

    class Attention(Recurrent):
        regions = Pool.regions

    pool = Attention()
    for n in range(9):
        pool.verify(f"short {n}", 40)
    assert pool.verify("long", 44) == "same"
    pool.canary.close()


def test_where_no_path_differs_states_are_judged_at_once():
    """As on many CPUs."""
    pool = Recurrent()
    for n in range(20):
        assert pool.verify(f"equal {n}", 40, noise=0.0) == "same"
    assert pool.verify("broken", 150, noise=0.0, factor=1.5) == "differs"
    pool.canary.close()


def test_a_path_that_rounds_otherwise_is_no_fault_where_all_requests_were_equal(pool):
    """Longer sequences and other batches than the first ones may take it: it teaches, and what is more is a fault."""
    for n in range(EQUAL_REQUESTS):
        pool.judge.judge(*pool.request(f"equal {n}", noise=0.0))
    assert pool.judge.judge(*pool.request("rounds", noise=3 * ROUNDING)).verdict == "same"
    assert pool.canary.stats()["recompute_taught"] == EQUAL_REQUESTS + 1
    assert pool.judge.judge(*pool.request("faulty", noise=60 * ROUNDING)).verdict == "differs"
    for n in range(PAIRED_REQUESTS):
        assert pool.judge.judge(*pool.request(f"rounds {n}", noise=3 * ROUNDING)).verdict == "same"
    learnt = PAIRED_REQUESTS + EQUAL_REQUESTS
    assert pool.canary.stats()["recompute_taught"] == learnt


class States(Pool):
    """Beside the layers a recurrent state of four heads in two slots: of a request, and of the same computed again."""

    def regions(self) -> list[Region]:
        self.state = torch.randn(2, 4, 32, 8, generator=self.random)
        self.state[1] = self.state[0]
        source = KVSource(
            self.state, "ssm", 0, chunk_bytes=4096, slot_stride_bytes=4096, dtype=torch.float32, role=Role.STATE
        )
        return [self.region, Region("state", 2, (source,), kind=RegionKind.STATE)]

    def verify(self, name: str) -> Verification:
        """The verdict on a request whose KV is equal."""
        cached, computed = self.request(name, noise=0.0)
        within = Computed.within(self.canary.regions["state"], torch.tensor([1]))
        cached = replace(cached, slots={**cached.slots, "state": torch.tensor([0])})
        return self.judge.judge(cached, {**computed, "state": within})


def test_one_head_of_a_state_is_no_verdict_without_noise_of_the_request_s_own():
    """Kernels of prefills and decodes may be far apart in what is left of a state that is nearly forgotten."""
    pool = States()
    for n in range(EQUAL_REQUESTS):
        pool.verify(f"equal {n}")
    pool.state[0, 2] *= 40
    assert pool.verify("one head").verdict == "same"
    pool.state[0, :2] *= 1.1
    assert pool.verify("all but one").verdict == "differs"
    assert [v.rule for v in pool.findings.violations] == ["state"]
    assert "in the median of its rows" in pool.findings.violations[0].explanation
    pool.canary.close()


def test_states_under_whose_noise_anything_hides_are_not_compared():
    """Where a row of a clean request was off by a third: another one is a thousand times as far off."""
    pool = States()
    for n in range(8):
        pool.state[0] = pool.state[1] * 1.01
        pool.state[0, 0, 3] *= 1.3
        pool.verify(f"fresh {n}")
    pool.state[0] *= 100
    answer = pool.verify("far")
    assert (answer.verdict, answer.uncompared) == ("same", ["state ssm.0"])
    assert [one.region for one in answer.layers if one.region == "state"] == []
    pool.canary.close()


def test_layers_under_whose_noise_anything_hides_are_said_to_be_left_out(pool):
    """Where tokens of clean requests are off by a third, a bound is no verdict; the exact layer is judged."""
    for n in range(8):
        pool.judge.judge(*pool.request(f"fresh {n}", noise=0.3))
    answer = pool.judge.judge(*pool.request("clean", noise=0.3))
    assert (answer.verdict, answer.uncompared) == ("same", ["kv k.1", "kv k.2", "kv k.3"])
    assert [event.fields["sources"] for event in pool.findings.told("recompute_left_out")] == [answer.uncompared]
    assert pool.canary.stats()["recompute_left_out"] == 1
    cached, computed = pool.request("broken", noise=0.3)
    pool.tensors[0][pool.own] *= 1.001
    assert pool.judge.judge(cached, computed).verdict == "differs"


def test_layer_zero_stays_exact(pool):
    """Where pairs were equal in every bit, one rounding is all that counts as noise."""
    pool.taught()
    cached, computed = pool.request("broken", noise=0.0)
    pool.tensors[0][pool.own] *= 1 + 1e-4
    assert pool.judge.judge(cached, computed).verdict == "differs"
    assert [v.layer for v in pool.findings.violations] == [0]


def test_equal_bits_are_the_same_before_anything_is_known(pool):
    """And teach nothing: an engine whose paths are all alike never counts as known."""
    for n in range(12):
        assert pool.judge.judge(*pool.request(f"{n}", noise=0.0)).verdict == "same"
    assert not pool.judge.noise.known
    assert pool.judge.judge(*pool.request("other")).verdict == "unjudged"


def test_what_something_else_brought_teaches_nothing(pool):
    """A hit may have been computed with other weights."""
    for n in range(12):
        answer = pool.judge.judge(*pool.request(f"{n}", touches=(Touch("hit", 16),)))
        assert answer.verdict == "unjudged"
    assert pool.judge.noise.paired_requests == 0
    assert pool.canary.stats()["recompute_unjudged"] == 12
    assert len(pool.findings.told("unjudged")) == 1


def test_a_shallow_layer_that_was_exact_by_chance_is_not_held_to_it(pool):
    """Without random roundings no layer is taken to be more exact than those before it; layers behind are judged."""
    pool.taught()
    bounds = [pool.judge.noise.bound("kv", source).window for source in pool.region.sources]
    assert bounds == sorted(bounds)
    assert bounds[0] == ROUNDING
    assert bounds[1] > NOISE


def test_what_has_no_numbers_is_told(pool):
    """Of sources that were not computed again the answer says so; without any there is no verdict."""
    cached, computed = pool.request("a")
    few = Computed(computed["kv"].sources[:2], computed["kv"].slots)
    assert pool.judge.judge(cached, {"kv": few}).uncompared == ["kv k.2", "kv k.3"]
    answer = pool.judge.judge(cached, {})
    assert "can be compared as numbers" in answer.reason
    (left_out,) = pool.findings.told("recompute_left_out")
    assert (left_out.fields["sources"], pool.canary.stats()["recompute_left_out"]) == (["kv k.2", "kv k.3"], 1)
    coverage = pool.findings.told("coverage")[-1]
    assert [item["name"] for item in coverage.fields["uncovered"]] == ["second computation of kv k.2 and 1 more"]
    assert coverage.fields["coverage_ratio"] == 1
    assert "not compared: kv k.0, kv k.1" in answer.table()


class StatePool(Pool):
    """K of tokens beside a state of each request, of two heads and as many rows of numbers as a verdict takes."""

    def __init__(self, shape: tuple[int, ...] = (2, 32, 8)) -> None:
        super().__init__()
        self.held = torch.zeros(8, *shape)
        size = self.held[0].numel() * 4
        source = KVSource(self.held, "ssm", 1, chunk_bytes=size, slot_stride_bytes=size, dtype=torch.float32)
        self.state = Region("state", 8, (source,), RegionKind.STATE, null_slot=0)
        config = CanaryConfig.load(mode="log", silence_s=0, bytes="off")
        self.canary.close()
        self.canary = Canary([self.region, self.state], config, hooks=private_hooks(self.findings))
        self.judge = RecomputeJudge(self.canary, lambda: ROUNDING)

    def request(self, name: str, noise: float = NOISE, touches: tuple[Touch, ...] = ()) -> "tuple[CachedRequest, dict]":
        """Its state is in slot 3, and that of the second computation in slot 5."""
        cached, computed = super().request(name, noise, touches)
        self.held[3] = torch.randn(self.held[3].shape, generator=self.random)
        self.held[5] = self.held[3] * (1 + noise * torch.randn(self.held[3].shape, generator=self.random))
        slots = {**cached.slots, "state": torch.tensor([3])}
        own = {**computed, "state": Computed.within(self.state, torch.tensor([5]))}
        return CachedRequest(name, cached.tokens, slots, touches), own


@pytest.mark.parametrize("shape", [(2, 32, 8), (64,), (3, 64)])
def test_states_are_compared_row_by_row(shape):
    """Also those whose last dimension is divided to give as many rows as a verdict takes. Noise as in fresh requests is
    the same, and a state that is another one is found without a position; its bytes have no fingerprints by now."""
    pool = StatePool(shape)
    pool.taught()
    answer = pool.judge.judge(*pool.request("clean"))
    assert (answer.verdict, answer.uncompared) == ("same", [])
    assert {one.source for one in answer.layers} >= {"ssm.1"}
    cached, computed = pool.request("broken")
    pool.held[3] = torch.randn(shape, generator=pool.random)
    assert pool.judge.judge(cached, computed).verdict == "differs"
    (found,) = pool.findings.violations
    assert (found.rule, found.region, found.source, found.position) == ("state", "state", "ssm.1", None)
    pool.canary.close()


def test_rows_of_states_are_judged_by_medians_alone():
    """A third of the rows are others."""
    pool = StatePool()
    pool.taught()
    cached, computed = pool.request("odd rows")
    pool.held[3][:, ::3] *= -1
    answer = pool.judge.judge(cached, computed)
    assert answer.verdict == "same"
    assert [one.quarter_bound for one in answer.layers if one.source == "ssm.1"] == [None]
    pool.canary.close()


@pytest.mark.parametrize("layer", [1, 2])
def test_kv_is_named_before_a_state_of_the_same_layer(layer):
    """It has positions. Of layers behind the state's the first position is told with the state."""
    pool = StatePool()
    pool.taught()
    cached, computed = pool.request("broken")
    pool.held[3] += 1
    pool.tensors[layer][pool.own[64:]] *= 1.2
    assert pool.judge.judge(cached, computed).verdict == "differs"
    (found,) = pool.findings.violations
    assert (found.source, found.position) == (("k.1", 64) if layer == 1 else ("ssm.1", None))
    assert ("behind it k.2 differs from position 64 on" in found.detail) == (layer == 2)
    pool.canary.close()


def test_states_are_not_judged_before_as_many_pairs_had_some_as_it_takes():
    """Where only some pairs have: KV has its verdict meanwhile, and the answer names the states. Then they are."""
    pool = StatePool()

    def verify(name: str, states: bool, factor: float = 1.0) -> Verification:
        cached, computed = pool.request(name)
        pool.held[3] *= factor
        slots = cached.slots if states else {"kv": cached.slots["kv"]}
        return pool.judge.judge(CachedRequest(name, cached.tokens, slots), computed)

    for n in range(8):
        assert verify(f"none {n}", states=False).verdict == "unjudged"
    assert (verify("none", states=False).verdict, pool.judge.noise.lacks_states) == ("same", True)
    for n in range(8):
        answer = verify(f"some {n}", states=True)
        assert (answer.verdict, answer.uncompared) == ("same", ["state ssm.1"])
    assert (verify("well", states=True).uncompared, pool.judge.noise.lacks_states) == ([], False)
    assert verify("broken", states=True, factor=1.1).verdict == "differs"
    assert [v.rule for v in pool.findings.violations] == ["state"]
    pool.canary.close()


def test_states_that_are_not_compared_are_told_once():
    """Where both requests did not stand at the same token, or a state has too few numbers for a verdict."""
    pool, small = StatePool(), StatePool((3, 5))
    for name in "ab":
        cached, computed = pool.request(name)
        cached = CachedRequest(name, cached.tokens, {"kv": cached.slots["kv"]})
        assert pool.judge.judge(cached, {"kv": computed["kv"]}).uncompared == ["state ssm.1"]
        assert pool.judge.judge(*pool.request(f"{name} beside")).uncompared == []
        assert small.judge.judge(*small.request(name)).uncompared == ["state ssm.1"]
    for one in (pool, small):
        assert [event.fields["sources"] for event in one.findings.told("recompute_left_out")] == [["state ssm.1"]]
        assert one.canary.stats()["recompute_left_out"] == 2
        one.canary.close()


class CoarsePool(Pool):
    """The same stored in fp8, as an engine does whose paths agree up to `ROUNDING`: next to no number differs."""

    def __init__(self, whole: bool = True) -> None:
        super().__init__()
        self.tensors = [torch.zeros(SLOTS, DIM, dtype=torch.float8_e4m3fn) for _ in range(LAYERS)]
        sources = tuple(
            KVSource(tensor, "k", layer, chunk_bytes=DIM, slot_stride_bytes=DIM, dtype=tensor.dtype)
            for layer, tensor in enumerate(self.tensors)
        )
        self.canary.close()
        self.region = Region("kv", SLOTS, sources)
        config = CanaryConfig.load(mode="log", silence_s=0, bytes="off")
        self.canary = Canary(self.regions(), config, hooks=private_hooks(self.findings))
        self.judge = RecomputeJudge(self.canary, lambda: ROUNDING, whole)

    def request(self, name: str, noise: float = 0.0, touches: tuple[Touch, ...] = ()) -> "tuple[CachedRequest, dict]":
        """Both sides, with relative ``noise`` before both are stored, from layer 1 on."""
        own, other = torch.randperm(SLOTS, generator=self.random)[: 2 * TOKENS].split(TOKENS)
        for layer, tensor in enumerate(self.tensors):
            numbers = torch.randn(TOKENS, DIM, generator=self.random)
            error = 1 + noise * torch.randn(TOKENS, DIM, generator=self.random) if layer else 1
            tensor[own], tensor[other] = numbers.to(tensor.dtype), (numbers * error).to(tensor.dtype)
        self.own = own
        return CachedRequest(name, list(range(TOKENS)), {"kv": own}, touches), {
            "kv": Computed.within(self.region, other)
        }

    def taught(self) -> None:
        """By equal requests, and a few of which a single number differs."""
        for n in range(16):
            cached, computed = self.request(f"fresh {n}")
            if n % 5 == 4:
                self.step(1, 3)
            assert self.judge.judge(cached, computed).verdict == ("unjudged" if n % 5 == 4 else "same")
        assert self.judge.noise.known

    def step(self, layer: int, token: int) -> None:
        """One number is rounded to the other side."""
        self.tensors[layer].view(torch.uint8)[self.own[token], 5] ^= 1


@pytest.fixture
def coarse():
    """One for each test."""
    made = CoarsePool()
    yield made
    made.canary.close()


def test_a_step_of_a_coarse_type_and_all_that_it_makes_behind_are_noise(coarse):
    """Attention takes the step of one number to the layers behind, where all numbers may be a rounding off."""
    coarse.taught()
    cached, computed = coarse.request("clean", noise=0.01)
    assert (tokens := coarse.judge.judge(cached, computed)).verdict == "differs"
    assert tokens.layers[1].worst > 0.02 > tokens.layers[1].bound
    cached, computed = coarse.request("clean", noise=0.01)
    coarse.step(0, 2)
    answer = coarse.judge.judge(cached, computed)
    assert answer.verdict == "same"
    assert answer.layers[0].bound < 0.001
    assert answer.layers[1].bound > 0.06
    assert len(coarse.findings.violations) == 1


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "same"), (1.5, "differs")])
def test_a_quarter_of_tokens_in_a_coarse_type_is_a_verdict_beyond_a_step(factor, verdict, coarse):
    """Each number may fall to the next step in a token or other. Behind such a step, and in its own layer."""
    coarse.taught()
    for layer in (1, 2):
        cached, computed = coarse.request("odd")
        coarse.step(1, 3)
        held, odd = coarse.tensors[layer], coarse.own[40:160:3]
        held[odd] = (held[odd].float() * factor).to(held.dtype)
        assert coarse.judge.judge(cached, computed).verdict == verdict


def test_another_scale_of_a_coarse_type_is_found_behind_such_a_step_too(coarse):
    """One of 1.5 times the other."""
    coarse.taught()
    cached, computed = coarse.request("scale")
    coarse.step(0, 2)
    held = coarse.tensors[2]
    held[coarse.own] = (held[coarse.own].float() / 1.5).to(held.dtype)
    answer = coarse.judge.judge(cached, computed)
    assert answer.verdict == "differs"
    assert [(v.layer, v.position) for v in coarse.findings.violations] == [(2, 0)]


def test_numbers_near_the_smallest_ones_of_a_coarse_type_are_rounded_by_more(coarse):
    """V of a layer may be so small that a step is a third of it."""
    coarse.taught()
    cached, computed = coarse.request("small")
    coarse.step(0, 2)
    for slots in (coarse.own, computed["kv"].slots):
        small = 0.004 * torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(3))
        noise = 1 + 0.1 * torch.randn(TOKENS, DIM, generator=coarse.random)
        coarse.tensors[2][slots] = (small * noise).to(torch.float8_e4m3fn)
    answer = coarse.judge.judge(cached, computed)
    assert answer.verdict == "same"
    assert 0.2 < answer.layers[2].bound < 0.3


def test_a_shard_is_not_held_to_be_equal_by_what_it_does_not_see():
    """The step may be in a head of another rank."""
    pool = CoarsePool(whole=False)
    pool.taught()
    assert pool.judge.judge(*pool.request("clean", noise=0.01)).verdict == "same"
    pool.canary.close()


def test_numbers_with_scales_beside_them_are_not_compared_without(coarse):
    """As in MXFP8: equal values may have other bytes under another scale."""
    scales = torch.zeros(SLOTS, 1, dtype=torch.uint8)
    beside = KVSource(scales, "k_scale", 2, chunk_bytes=1, slot_stride_bytes=1, role=Role.SCALE)
    region = Region("kv", SLOTS, (*coarse.region.sources, beside))
    canary = Canary([region], coarse.canary.config, hooks=private_hooks(coarse.findings))
    cached, _ = coarse.request("a")
    judge = RecomputeJudge(canary, lambda: ROUNDING)
    answer = judge.judge(cached, {"kv": Computed.within(region, cached.slots["kv"])})
    assert answer.uncompared == ["kv k.2", "kv k_scale.2"]
    canary.close()
