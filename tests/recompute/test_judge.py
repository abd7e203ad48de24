"""Requests that an engine has computed again in slots of the same pool, judged by pairs alone."""

import pytest
import torch

from canary_core import CachedRequest, Canary, CanaryConfig, Computed, Kind, KVSource, RecomputeJudge, Region, Touch
from canary_core.plugins import private_hooks
from canary_core.testing import Findings

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
        self.canary = Canary([self.region], config, hooks=private_hooks(self.findings))
        self.judge = RecomputeJudge(self.canary, lambda: ROUNDING)

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
    assert "not compared: kv k.0, kv k.1" in answer.table()
