"""Running requests computed again: what no comparison of bytes sees is found, clean traffic is not blamed, and nobody's
answer changes. The engine is broken from outside, in its own forwards only."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tiny.batching import Traffic, served
from tiny.verified import (
    HIT,
    NEW,
    PROMPT,
    Verified,
    every_third_key,
    noisy_head,
    one_short,
    rope_after_a_hit,
    several,
    skipped_layer,
    tokens,
    weights_change,
    window_off_by_one,
)

from canary_core import CanaryError, Kind, LayerError, Verification
from canary_core.testing import Findings
from canary_core.watchers.recompute import sampler

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def engine(guard: Callable[..., Any]) -> Iterator[Callable[..., Verified]]:
    """Makes one, and restores the model's weights after the test."""
    yield from several(partial(Verified, guard))


@pytest.mark.parametrize(
    ("fault", "rule", "layer", "position", "diagnosis"),
    [
        (rope_after_a_hit, "half", 0, HIT, "other_half"),
        # Few tokens of so small a model attend to the last key at all, so the first layer behind is hardly touched.
        (one_short, "attention", 2, PROMPT, "other_attention"),
        # Layer 0 has the window, and a decode is beyond it from its 36th token on.
        (window_off_by_one, "attention", 1, PROMPT, "other_attention"),
        (skipped_layer, "everywhere", 2, 0, "other_weights"),
        (noisy_head, "attention", 1, PROMPT, "other_attention"),
    ],
)
def test_a_broken_forward_is_found(fault, rule, layer, position, diagnosis, engine, monkeypatch):
    """By layer and first position, with its likely class. The same request without the fault is the same."""
    verified = engine("gemma3" if fault is window_off_by_one else "llama")
    verified.taught()
    shared = tokens(verified.random)
    hits = fault is rope_after_a_hit
    verified.submit("right", shared)
    verified.finish()
    fault(verified, monkeypatch)
    for broken in (False, True):
        name = f"broken {broken}"
        # A block that holds the same tokens as another one would be given up for that one.
        verified.submit(name, [*shared[:HIT], *tokens(verified.random, 8)] if hits else None, NEW)
        verified.broken = broken
        verified.step(48)
        answer = verified.answer(name)
        assert answer.verdict == ("differs" if broken else "same"), answer.table()
        verified.finish()
    (found,) = [v for v in verified.guard.violations if v.kind is Kind.RECOMPUTE]
    assert (found.rule, found.layer, found.request) == (rule, layer, "broken True")
    assert position <= found.position <= position + 2
    assert found.explanation == answer.finding
    if hits:
        assert "a hit brought its first 32 tokens" in found.explanation
    told = [event for event in verified.findings.told("diagnosis") if event.fields["diagnosis"] == diagnosis]
    assert told, [event.fields for event in verified.findings.told("diagnosis")]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_third_of_the_tokens_is_found(dtype, engine, monkeypatch):
    """K of the last layer has another sign in every third token, so medians of tokens in a row see nothing."""
    verified = engine(dtype=dtype)
    verified.taught()
    every_third_key(verified, monkeypatch)
    for broken in (False, True):
        verified.submit(f"broken {broken}", None, NEW)
        verified.broken = broken
        verified.step(48)
        answer = verified.answer(f"broken {broken}")
        assert answer.verdict == ("differs" if broken else "same"), answer.table()
        verified.finish()
    (found,) = [v for v in verified.guard.violations if v.kind is Kind.RECOMPUTE]
    assert (found.layer, found.half) == (2, "k")
    assert found.position <= 2
    assert "by 2 of its size in a quarter of 32 tokens or more" in answer.finding
    assert [one.source for one in answer.layers if one.by_quarter] == ["k.2"]


def test_weights_changed_under_a_kept_cache_are_found(engine, monkeypatch):
    """Everywhere in a request that computed all itself, from the changed layer on; and in one that hits what is older,
    within what the hit brought. A request of the new weights alone is the same."""
    verified = engine(hit_check=False)
    verified.taught()
    shared = tokens(verified.random)
    verified.submit("older", shared)
    verified.step(30)
    assert verified.answer("older").verdict == "same"
    weights_change(verified, monkeypatch)
    assert verified.answer("older").verdict == "differs"
    verified.submit("hits", [*shared, *tokens(verified.random)])
    verified.submit("newer")
    verified.step(30)
    answers = {name: verified.answer(name) for name in ("hits", "newer")}
    assert {name: answer.verdict for name, answer in answers.items()} == {"hits": "differs", "newer": "same"}
    found = {v.request: v for v in verified.guard.violations if v.kind is Kind.RECOMPUTE}
    assert {name: v.rule for name, v in found.items()} == {"older": "everywhere", "hits": "brought"}
    assert {(v.layer, v.half, v.position) for v in found.values()} == {(1, "v", 0)}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_clean_traffic_is_never_blamed(name, engine):
    """Hits, forks and preemptions, in one batch and alone, with windows and without, verified again and again."""
    verified = engine(name)
    verified.taught()
    answers = verified.traffic(12)
    assert len(answers) > 60
    assert [answer.table() for answer in answers if answer.verdict != "same"] == []
    assert verified.guard.violations == []


@pytest.mark.parametrize("recompute", ["0", "100%"])
def test_answers_are_the_same_bit_for_bit(recompute, engine):
    """With every step's requests computed again, by a call or by the setting, and without: the same tokens, and the
    same bytes in the pool."""
    pools, answers = [], []
    for verify in (True, False):
        verified = engine(recompute=recompute if verify else "0")
        prompts = [tokens(random.Random(n)) for n in range(3)]
        for n, prompt in enumerate(prompts):
            verified.submit(f"{n}", prompt, 20)
        for _ in range(40):
            verified.step()
            if verify and recompute == "0":
                verified.recompute.now()
        answers.append([verified.engine.answer(f"{n}") for n in range(3)])
        pools.append(verified.engine._cache.cache_tensor.clone())
        stats = verified.guard.stats()
        assert (stats.get("recomputed_requests", 0) > (20 if recompute == "0" else 2)) is verify
        assert stats["violations"] == 0
        verified.guard.close()
        verified.engine.close()
    assert answers[0] == answers[1]
    assert torch.equal(pools[0], pools[1])


def test_nothing_is_made_until_somebody_asks(engine):
    """Off costs a look at one attribute."""
    verified = engine()
    verified.submit("a")
    verified.finish()
    assert verified.guard._sessions[0].verifier._recompute is None
    assert not [name for name in verified.guard.stats() if name.startswith("recompute")]


def test_weights_changed_under_a_kept_cache_are_found_without_being_asked_for(engine, monkeypatch):
    """By ``CANARY_RECOMPUTE`` alone, once the noise is known; fresh requests of the old weights were right. Searches
    don't wait for the clock, so that each request is looked at."""
    monkeypatch.setattr(sampler, "LOOK_S", 0.0)
    verified = engine(recompute="1000")
    for n in range(6):
        verified.submit(f"fresh {n}")
        verified.finish()
    assert verified.recompute.noise.known
    verified.submit("older")
    verified.step(30)
    assert verified.guard.violations == []
    weights_change(verified, monkeypatch)
    verified.finish()
    stats = verified.guard.stats()
    assert stats["recompute_same"] > 0
    assert stats["recompute_differs"] == 1
    (found,) = verified.guard.violations
    assert (found.request, found.layer, found.position) == ("older", 1, 0)
    # Tokens decoded since the change are right: how many there are depends on the moment of the recompute.
    assert found.rule in ("everywhere", "attention")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_where_each_request_has_a_hit_there_are_verdicts(dtype, engine):
    """All prompts begin alike, and a request that nobody verified has left their prefix in the cache: noise is learnt
    from requests with a hit, which are the same then."""
    verified = engine(dtype=dtype)
    prefixes = [verified.prefix() for _ in range(3)]
    verified.taught(prefixes[0])
    answers = verified.traffic(8, prefixes)
    assert len(answers) > 40
    assert [answer.table() for answer in answers if answer.verdict != "same"] == []
    assert verified.guard.violations == []


def test_noise_that_was_learnt_from_stale_hits_hides_none_of_them(engine, monkeypatch):
    """A weight changed under the kept prefix before anything was known: no request has right KV, and the one that
    completes the noise is found. One that computes all itself with the new weight is the same."""
    verified = engine(hit_check=False)
    prefix = verified.prefix()
    weights_change(verified, monkeypatch)
    answers = []
    for n in range(6):
        verified.submit(f"{n}", [*prefix, *tokens(verified.random, 8)], 50)
        verified.step(45)
        answers.append(verified.answer(f"{n}"))
        verified.finish()
    assert [answer.verdict for answer in answers] == ["unjudged"] * 3 + ["differs"] * 3
    assert "more requests must be verified first; so far taught by 3 of 4 requests" in answers[2].reason
    found = [v for v in verified.guard.violations if v.kind is Kind.RECOMPUTE]
    assert {(v.rule, v.layer, v.half, v.position) for v in found} == {("brought", 1, "v", 0)}
    verified.submit("newer")
    verified.step(30)
    assert verified.answer("newer").verdict == "same"


def test_stale_hits_are_found_without_being_asked_for_where_all_have_one(engine, monkeypatch):
    """By ``CANARY_RECOMPUTE`` alone; nothing starves."""
    monkeypatch.setattr(sampler, "LOOK_S", 0.0)
    verified = engine(recompute="1000", hit_check=False)
    verified.submit("prefix", [*(prefix := tokens(verified.random, HIT)), 5], 1)
    verified.finish()
    weights_change(verified, monkeypatch)
    for n in range(6):
        verified.submit(f"{n}", [*prefix, *tokens(verified.random, 8)], 50)
        verified.finish()
    stats = verified.guard.stats()
    assert stats["recompute_differs"] > 0
    assert stats["recompute_taught"] >= 4
    found = [v for v in verified.guard.violations if v.kind is Kind.RECOMPUTE]
    assert {(v.rule, v.layer, v.position) for v in found} == {("brought", 1, 0)}
    assert verified.findings.told("recompute_starved") == []


def test_what_can_not_be_judged_says_so(engine):
    """Too few tokens, a request that is unknown, and noise that is not known: each with its reason, counted, and told
    once."""
    verified = engine()
    verified.submit("short", tokens(verified.random, 5), 8)
    verified.step(6)
    assert "fewer than 32 tokens" in verified.answer("short").reason
    assert "is not running" in verified.answer("nobody").reason
    verified.finish()
    for name in ("a", "b", "c"):
        verified.submit(name, None, 50)
    verified.step(45)
    assert all("not known yet" in answer.reason for answer in verified.recompute.now())
    assert verified.guard.stats()["recompute_unjudged"] == 5
    assert len(verified.findings.told("unjudged")) == 3


def test_an_engine_that_does_not_come_to_it_and_a_computation_that_fails(engine, monkeypatch):
    """Whoever asked hears of it, from a loop that stands still after the time given and of an error at once; the engine
    goes on, and its guard too."""
    verified = engine()
    verified.submit("a")
    verified.step(20)
    with pytest.raises(CanaryError, match=r"nothing was verified within 0\.01 s"):
        verified.guard.verify(timeout_s=0.01)
    layer = verified.model.model.layers[0]
    compute = layer.forward

    def fails(*args: Any, **kwargs: Any) -> Any:
        if not verified._in_step:
            raise RuntimeError("no kernel image")
        return compute(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", fails)
    asked: list[BaseException] = []

    def ask() -> None:
        try:
            verified.guard.verify("a", timeout_s=300)
        except CanaryError as error:
            asked.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        verified.recompute.serve()
    assert "the recompute failed: RuntimeError: no kernel image" in str(asked[0])
    before = len(verified.engine.answer("a"))
    verified.step(3)
    assert len(verified.engine.answer("a")) > before
    assert verified.guard._sessions[0].canary.enabled


def test_answers_have_no_figure_that_json_has_not():
    """An infinite error is None in plain values, and said in the table."""
    layer = LayerError("kv", "k.3", 3, 40, 0.0, float("inf"), 0.1)
    answer = Verification("a", 40, "differs", None, "why", [layer])
    assert json.loads(json.dumps(answer.to_dict(), allow_nan=False))["layers"][0]["worst"] is None
    assert answer.table().splitlines()[-1].endswith("worst inf, noise up to 0.1  <-- differs")


def test_attention_without_a_mask_of_its_own_is_refused(engine):
    """What the engine calls ``paged|eager`` would see the future in a forward of ours."""
    verified = engine()
    verified.submit("a")
    verified.step(20)
    verified.model.set_attn_implementation("paged|eager")
    try:
        assert "makes no causal mask" in verified.answer("a").reason
    finally:
        verified.model.set_attn_implementation("sdpa")


@contextmanager
def managed(model: Any, traffic: Traffic) -> Iterator[Any]:
    """A running manager, in a thread of its own."""
    with model.continuous_batching_context_manager(**traffic.settings(model)) as manager:
        yield manager


def test_a_manager_that_idles_before_its_first_request_keeps_its_recompute(guard):
    """Its loop turns, and no forward has run: nothing is told, and the first request is looked at all the same."""
    model, findings = served("llama", "cpu"), Findings()
    guarded = guard(model, recompute="100%")
    guarded.register(findings)
    with managed(model, Traffic(new_tokens=100, pages=100)) as manager:
        time.sleep(1.0)
        assert guarded._sessions
        assert [name for name in guarded.stats() if name.startswith("recompute")] == []
        manager.add_request(list(range(3, 63)), request_id="a", max_new_tokens=100)
        while not manager.get_result(timeout=300).is_finished():
            pass
    assert guarded.stats()["recomputed_requests"] >= 1
    assert [event.fields["request"] for event in findings.told("unjudged")] in ([], ["a"])
    assert findings.told("recompute_off") == []


def test_a_running_manager_answers_other_threads(guard, tmp_path):
    """`Guard.verify` from the caller's thread, while the engine's loop serves: an idle loop answers too, for what ended
    requests left."""
    tmp_path.chmod(0o700)
    model = served("llama", "cpu")
    guarded = guard(model, control="write", control_dir=str(tmp_path))
    with pytest.raises(CanaryError, match="no continuous batching is guarded"):
        guarded.verify()
    with managed(model, Traffic(new_tokens=400, pages=100)) as manager:
        manager.add_request(list(range(3, 63)), request_id="a", max_new_tokens=400)
        deadline, answers = time.monotonic() + 300, []
        while not answers and time.monotonic() < deadline:
            if manager.batch_processor is not None and guarded._sessions:
                answers = [answer for answer in guarded.verify(timeout_s=300) if answer.tokens >= 32]
        assert {answer.request for answer in answers} == {"a"}
        assert answers[0].to_dict()["layers"][0]["source"] == "k.0"
        (unknown,) = guarded.verify("nobody", timeout_s=300)
        assert "is not running" in unknown.reason
        while not manager.get_result(timeout=300).is_finished():
            pass
        (left,) = guarded.verify("a", timeout_s=300, parked=True)
        assert (left.tokens, left.parked, left.verdict in ("same", "unjudged")) == (456, True, True), left.table()
        assert [answer.request for answer in guarded.verify(timeout_s=300, parked=True)] == ["a"]
        with pytest.raises(CanaryError, match=r"not all was verified within 0 s"):
            guarded.verify(timeout_s=0, parked=True)
    assert guarded.violations == []
