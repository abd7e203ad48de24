"""Noise by a request's computations alone. Models with recurrent layers: a request is blamed for nothing that these
differ by, and states have their own verdict. Touched requests teach by them. Nothing is learnt from a model whose paths
compute different things."""

import copy
from collections.abc import Iterator

import pytest
import torch

from canary_core import (
    CachedRequest,
    Canary,
    CanaryConfig,
    Computed,
    Kind,
    KVSource,
    Recompute,
    Recomputer,
    Region,
    Role,
    Touch,
)
from canary_core.plugins import private_hooks
from canary_core.testing import Findings

TOKENS, DIM, ROW, ROWS = 64, 8, 32, 48


def source(values: torch.Tensor, half: str, layer: int, role: Role = Role.DATA) -> KVSource:
    """Of rows of floats."""
    return KVSource(values, half, layer, chunk_bytes=ROW, slot_stride_bytes=ROW, dtype=torch.float32, role=role)


class Hybrid(Recomputer):
    """KV of layer 1, and a state of layer 2. ``apart``: size of the errors of each computation; ``wrong_path``: of
    those token by token, beside these; ``off``: of what the cache holds; ``lengths``: tokens of forwards, by call;
    ``touches``: of the request."""

    rounding = 1e-7
    recurrent = True

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(1)
        self.right = {"kv": torch.randn(TOKENS, DIM, generator=self.random)}
        self.right["state"] = torch.randn(ROWS, DIM, generator=self.random)
        self.pool = torch.zeros(TOKENS, DIM)
        self.region = Region("kv", TOKENS, (source(self.pool, "k", 1),))
        self.held = torch.zeros(ROWS, DIM)
        self.apart = 1e-6
        self.wrong_path = 0.0
        self.off = {"kv": 1e-6, "state": 1e-6}
        self.lengths: list[int] = []
        self.touches: list[Touch] = []

    def near(self, name: str, by: float) -> torch.Tensor:
        """The right numbers with an error."""
        right = self.right[name]
        return right + by * torch.randn(right.shape, generator=self.random)

    def requests(self):
        return ["r"]

    def cached(self, request):
        self.pool.copy_(self.near("kv", self.off["kv"]))
        self.held.copy_(self.near("state", self.off["state"]))
        slots = {"kv": torch.arange(TOKENS), "recurrent state": torch.arange(ROWS)}
        return CachedRequest(request, range(TOKENS), slots, self.touches)

    def compute(self, request, chunk_tokens, jitter=0.0, observer=None):
        self.lengths.append(chunk_tokens)
        wrong = self.wrong_path if chunk_tokens == 1 else 0.0
        kv, state = (self.near(name, self.apart + wrong) for name in ("kv", "state"))
        return {
            "kv": Computed((source(kv, "k", 1),), torch.arange(TOKENS)),
            "recurrent state": Computed((source(state, "recurrent", 2, Role.STATE),), torch.arange(ROWS)),
        }


@pytest.fixture
def hybrid() -> Iterator[tuple[Hybrid, Recompute, Findings]]:
    """A recompute whose canary knows of the state, too."""
    engine, findings = Hybrid(), Findings()
    config = CanaryConfig.load(mode="log", silence_s=0, bytes="off")
    canary = Canary([engine.region], config, hooks=private_hooks(findings))
    state = Region("recurrent state", ROWS, (source(engine.held, "recurrent", 2, Role.STATE),))
    # As in `CacheRecomputer.states`: memory of the ops, of which a comparison uses little, with other sources.
    more = copy.copy(canary.states["kv"])
    more.region = state
    canary.states["recurrent state"] = more
    yield engine, Recompute(canary, engine), findings
    canary.close()


def verdict(recompute: Recompute) -> str:
    """Of the only request."""
    (answer,) = recompute.now("r")
    return answer.verdict


def test_what_a_requests_own_computations_differ_by_is_no_finding(hybrid):
    """A request of which all computations are as far from each other as the cache from them, a hundred times the noise
    of those before: found where only the cache is."""
    engine, recompute, findings = hybrid
    assert [verdict(recompute) for _ in range(5)] == ["unjudged"] * 4 + ["same"]
    engine.apart = engine.off["kv"] = engine.off["state"] = 1e-4
    assert verdict(recompute) == "same"
    assert recompute._canary.stats()["recompute_own_noise"] == 1
    engine.apart, engine.off["state"] = 1e-6, 1e-6
    assert findings.violations == []
    assert verdict(recompute) == "differs"
    (found,) = findings.violations
    assert (found.kind, found.layer, found.rule, found.position) == (Kind.RECOMPUTE, 1, "everywhere", 0)


def test_a_state_is_told_by_layer_without_a_position(hybrid):
    """Where all KV is right."""
    engine, recompute, findings = hybrid
    assert [verdict(recompute) for _ in range(5)][-1] == "same"
    engine.off["state"] = 0.01
    assert verdict(recompute) == "differs"
    (found,) = findings.violations
    assert (found.layer, found.half, found.rule, found.position, found.slot) == (2, "recurrent", "state", None, None)
    assert "in the median of 32 rows" in found.explanation


def test_noise_is_learnt_from_single_tokens_and_several_roundings(hybrid):
    """Each fresh request: the verdict's computation, two other paths and two with roundings, for both looks."""
    engine, recompute, _ = hybrid
    assert verdict(recompute) == "unjudged"
    assert engine.lengths == [512, 7, 1, 512, 7, 512, 7, 7, 1]


def test_a_model_whose_paths_compute_different_things_teaches_nothing(hybrid):
    """As one that continues its states wrongly: far less than half of the size, far more than rounding."""
    engine, recompute, findings = hybrid
    engine.wrong_path = 0.01
    answers = [recompute.now("r")[0] for _ in range(6)]
    assert {answer.verdict for answer in answers} == {"unjudged"}
    assert all("in calls of one or of several tokens" in answer.reason for answer in answers)
    assert recompute._canary.stats()["recompute_unlike"] == 6
    assert len([event for event in findings.told("unjudged") if "several tokens" in event.fields["reason"]]) == 1
    assert findings.violations == []


def test_an_engine_without_states_computes_as_before(hybrid):
    """Two paths and two with roundings, and no look at the request's own noise before a finding."""
    engine, recompute, findings = hybrid
    engine.recurrent = False
    assert [verdict(recompute) for _ in range(4)] == ["unjudged"] * 4
    assert engine.lengths[:4] == [512, 512, 512, 7]
    engine.off = dict.fromkeys(engine.off, 0.01)
    count = len(engine.lengths)
    assert verdict(recompute) == "differs"
    assert len(engine.lengths) == count + 1
    assert len(findings.violations) == 1


def test_an_engine_that_was_wrong_from_its_start_teaches_nothing(hybrid):
    """What it left in the cache is far less than half of its size off, and far more than roundings explain. Nor do
    touched requests teach after that, until a fresh one is as it should be."""
    engine, recompute, findings = hybrid
    engine.recurrent = False
    engine.off["kv"] = 0.01
    answers = [recompute.now("r")[0] for _ in range(6)]
    assert {answer.verdict for answer in answers} == {"unjudged"}
    assert all("wrong from its start" in answer.reason for answer in answers)
    assert recompute._canary.stats()["recompute_unlike"] == 6
    (told,) = [event.fields for event in findings.told("unjudged") if "from its start" in event.fields["reason"]]
    assert told["error"] == pytest.approx(0.01, rel=0.2)
    engine.touches = [Touch("hit", 40)]
    answers = [recompute.now("r")[0] for _ in range(6)]
    assert {(answer.verdict, "wrong from its start" in answer.reason) for answer in answers} == {("unjudged", True)}
    assert findings.violations == []
    engine.touches, engine.off["kv"] = [], 1e-6
    assert {verdict(recompute) for _ in range(4)} == {"unjudged"}
    assert verdict(recompute) == "same"


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_touched_request_teaches_by_its_computations_alone(recurrent, hybrid):
    """What a hit brought is wrong in all requests, and none of it is taken for noise: the request that completes the
    noise differs at once, as far as its kind of fault is ever found. The right KV is the same."""
    engine, recompute, findings = hybrid
    engine.recurrent, engine.touches, engine.off["kv"] = recurrent, [Touch("hit", 40)], 1e-3
    answers = [recompute.now("r")[0] for _ in range(5)]
    assert [answer.verdict for answer in answers] == ["unjudged"] * 3 + ["differs"] * 2
    assert "more requests must be verified first; so far taught by 3 of 4 requests" in answers[2].reason
    assert engine.lengths[:5] == [512, 7, 1, 512, 7]
    assert {found.rule for found in findings.violations} == {"brought"}
    engine.off["kv"] = 1e-6
    assert verdict(recompute) == "same"
    assert recompute._canary.stats()["recompute_taught"] == 4


def test_fresh_requests_go_on_to_teach_after_touched_ones(hybrid):
    """Four of them, as they know the engine's own path, which is further off here. Then nothing more is learnt."""
    engine, recompute, _ = hybrid
    engine.recurrent, engine.touches = False, [Touch("hit", 40)]
    assert [verdict(recompute) for _ in range(4)][-1] == "same"
    source = engine.region.sources[0]
    alone, engine.touches = recompute.noise.bound("kv", source), []
    engine.off["kv"] = 1.9e-6
    assert {verdict(recompute) for _ in range(6)} == {"same"}
    assert recompute.noise.bound("kv", source).window > alone.window
    assert recompute._canary.stats()["recompute_taught"] == 8


def test_noise_of_touched_requests_alone_is_no_finding_before_a_look_at_the_requests_own(hybrid):
    """One whose computations are all as far from each other as the cache from them, as with states."""
    engine, recompute, findings = hybrid
    engine.recurrent, engine.touches = False, [Touch("hit", 40)]
    assert [verdict(recompute) for _ in range(4)][-1] == "same"
    engine.apart = engine.off["kv"] = engine.off["state"] = 1e-4
    assert verdict(recompute) == "same"
    assert recompute._canary.stats()["recompute_own_noise"] == 1
    assert findings.violations == []


def test_a_fresh_request_that_differs_teaches_nothing(hybrid):
    """Once touched ones have taught the noise."""
    engine, recompute, findings = hybrid
    engine.recurrent, engine.touches = False, [Touch("hit", 40)]
    assert [verdict(recompute) for _ in range(4)][-1] == "same"
    engine.touches, engine.off["kv"] = [], 1e-4
    assert {verdict(recompute) for _ in range(3)} == {"differs"}
    assert recompute._canary.stats()["recompute_taught"] == 4
    assert len(findings.violations) > 0


def test_touched_requests_of_a_model_whose_paths_are_apart_teach_nothing(hybrid):
    """The answer says why there is no verdict."""
    engine, recompute, findings = hybrid
    engine.recurrent, engine.touches, engine.wrong_path = False, [Touch("hit", 40)], 0.01
    answers = [recompute.now("r")[0] for _ in range(6)]
    assert {answer.verdict for answer in answers} == {"unjudged"}
    assert all("in calls of one or of several tokens" in answer.reason for answer in answers)
    assert recompute._canary.stats()["recompute_unlike"] == 6
    assert findings.violations == []
