"""Rows of models with recurrent layers computed again: clean answers are not blamed, whatever the paths; what is wrong
in the model's own forwards, or in a state, is found. The model is broken from outside, in forwards of its user only."""

from typing import Any

import pytest
import torch
from canary_transformers import recurrent
from tiny.answers import PROMPT, weights_change
from tiny.generation import CACHE

from canary_core import Kind

pytestmark = pytest.mark.usefixtures("one_thread")
BESIDE = pytest.mark.takes_turns("the same of Falcon-H1 in float32")
REFUSED = {"jamba": "another expert", "nemotron_h": "no noise was measured"}
SAME = ("bamba", "lfm2", "lfm2_moe", "olmo_hybrid", "qwen3_5")


@pytest.mark.parametrize(
    ("kind", "floats"),
    [
        ("falcon_h1", "float32"),
        *(pytest.param(kind, "float32", marks=BESIDE) for kind in SAME),
        pytest.param("qwen3_5", "bfloat16", marks=BESIDE),
    ],
)
def test_clean_answers_of_hybrid_models_are_never_blamed(kind, floats, answers):
    """Of several rows, padded, sampled, in chunks, and decoded for long; learnt from rows that hardly decoded."""
    one = answers(kind, floats)
    kept = one.generate(one.prompts(5, 60), max_new_tokens=2)
    assert {answer.verdict for answer in one.verdicts()} <= {"same", "unjudged"}
    judged = []
    for settings in ({"do_sample": True}, {"prefill_chunk_size": 16}, {"max_new_tokens": 80}):
        ids = one.prompts(3)
        ids[0, :7] = 0
        kept = one.generate(ids, **settings)
        judged += one.verdicts()
        del kept
    assert [answer.table() for answer in judged if answer.verdict != "same"] == []
    assert one.guard.violations == []


@pytest.mark.parametrize("kind", ["falcon_h1", pytest.param("qwen3_5", marks=BESIDE)])
def test_weights_changed_in_a_hybrid_model_are_found(kind, answers):
    """Under a kept cache. An answer of the new weights alone is the same."""
    one = answers(kind)
    one.taught()
    kept = one.generate(one.prompts(2))
    weights_change(one)
    found = one.verdicts()
    assert [answer.verdict for answer in found] == ["differs", "differs"], found[0].table()
    assert {(v.kind, v.layer, v.rule) for v in one.guard.violations} == {(Kind.RECOMPUTE, 1, "everywhere")}
    kept = one.generate(one.prompts())
    assert kept is not None
    assert [answer.verdict for answer in one.verdicts()] == ["same"]


@pytest.mark.parametrize("kind", ["falcon_h1", pytest.param("qwen3_5", marks=BESIDE)])
def test_a_layer_skipped_in_a_later_call_of_a_hybrid_model_is_found(kind, answers, monkeypatch):
    """In the second of three chunks. The same without the fault is the same."""
    one = answers(kind)
    one.taught()
    layer = one.model.model.layers[1]
    compute = layer.forward

    def forward(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        computed = compute(hidden, *args, **kwargs)
        skipped = (hidden, *computed[1:]) if isinstance(computed, tuple) else hidden
        return skipped if one.acts else computed

    monkeypatch.setattr(layer, "forward", forward)
    for broken in (False, True):
        cache, ids = one.cache(), one.prompts(1, 120)
        for chunk in range(3):
            one.broken = broken and chunk == 1
            one.call(cache, ids[:, 40 * chunk : 40 * chunk + 40])
        one.broken = False
        (answer,) = one.verdicts()
        assert answer.verdict == ("differs" if broken else "same"), answer.table()
    (found,) = [v for v in one.guard.violations if v.kind is Kind.RECOMPUTE]
    assert found.layer in (2, 3)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_paths_compute_different_things_is_not_judged(kind, answers, monkeypatch):
    """Jamba's calls of several tokens behind a state are wrong in Transformers 5.24, and the decodes of Nemotron-H have
    another limit of time steps than its prefills: no type of model that was measured, and if they were, the paths'
    difference is told, and no noise learnt from it."""
    one = answers(kind)
    kept = one.generate(one.prompts(2))
    assert {answer.verdict for answer in one.verdicts()} == {"unjudged"}
    assert REFUSED[kind] in one.verdicts()[0].reason
    monkeypatch.setattr(recurrent, "MEASURED", {kind: (torch.float32,)})
    for _ in range(4):
        kept = one.generate(one.prompts(2, PROMPT + 20))
        found = one.verdicts()
        assert [answer.verdict for answer in found] == ["unjudged"] * 2, found[0].table()
        assert "computes other KV in calls of one or of several tokens" in found[0].reason
    assert kept is not None
    assert one.guard.violations == []
    assert one.guard.stats()["recompute_unlike"] == 8


def test_answers_of_a_hybrid_model_are_the_same_bit_for_bit(answers):
    """With all rows computed again at every step, and without: tokens, KV and states."""
    made = []
    for recompute in ("100%", "0"):
        one = answers("falcon_h1", recompute=recompute)
        torch.manual_seed(5)
        kept = one.generate(torch.tensor([[*range(3, 43)], [*range(50, 90)]]), do_sample=True)
        cache = kept.past_key_values
        held = [state for _, _, state in recurrent.states(cache.layers)]
        made.append((kept.sequences, *held, *(layer.keys for layer in cache.layers)))
        assert (one.guard.stats().get("recomputed_requests", 0) > 1) is (recompute == "100%")
        assert one.guard.violations == []
        one.guard.close()
    assert len(made[0]) == 1 + 3 * 4
    assert all(map(torch.equal, *made))


STATE = "a recurrent state of generate"


def scaled(held: torch.Tensor, size: float) -> None:
    """Of the second row, half of the heads."""
    held[1, : held.shape[1] // 2] *= 1 + size


def kept(held: torch.Tensor, size: float) -> None:
    """What was there is not cleared, as where a row begins with the state of another one."""
    held[1] += size * held[0]


def exchanged(held: torch.Tensor, size: float) -> None:
    """Two rows."""
    held[:2] = held[:2].flip(0).clone()


@pytest.mark.parametrize(("floats", "size"), [("float32", 0.1), pytest.param("bfloat16", 2.0, marks=BESIDE)])
@pytest.mark.parametrize("kind", ["falcon_h1", pytest.param("qwen3_5", marks=BESIDE)])
def test_a_state_that_is_another_is_found_by_layer_and_state(kind, floats, size, answers):
    """Changed between two forwards, behind the last token: no KV differs, so nothing else can see it. The third row,
    and all of them before, are the same."""
    one = answers(kind, floats)
    one.taught()
    for fault, rows in ((scaled, {1}), (kept, {1}), (exchanged, {0, 1})):
        told = len(one.guard.violations)
        answer = one.generate(one.prompts(3), max_new_tokens=20)
        assert {found.verdict for found in one.verdicts()} == {"same"}
        layers = answer[CACHE].layers
        fault(layers[0].recurrent_states[0], size)
        verdicts = {int(found.request.rpartition(" ")[2]): found for found in one.verdicts()}
        assert {row for row, found in verdicts.items() if found.verdict == "differs"} == rows, verdicts[1].table()
        assert all(str(verdicts[row].finding).startswith(STATE) for row in rows)
        found = one.guard.violations[told:]
        assert {(v.kind, v.layer, v.half, v.rule) for v in found} == {(Kind.RECOMPUTE, 0, "recurrent", "state")}
        assert {(v.position, v.slot) for v in found} == {(None, None)}
        del answer, layers


def test_a_conv_state_that_was_cleared_is_found(answers):
    """Of one row and layer."""
    one = answers("falcon_h1")
    one.taught()
    answer = one.generate(one.prompts(2), max_new_tokens=20)
    answer[CACHE].layers[1].conv_states[0][0] = 0
    assert [found.verdict for found in one.verdicts()] == ["differs", "same"]
    (found,) = one.guard.violations
    assert (found.layer, found.half, found.rule) == (1, "conv", "state")


def test_a_state_broken_in_the_middle_of_an_answer_is_found_at_its_end(answers, monkeypatch):
    """From the tenth decode on a layer keeps its state as it was: by that state, and the KV of layers behind."""
    one = answers("falcon_h1")
    one.taught()
    layer, calls = one.model.model.layers[1].mamba, 0
    compute = layer.forward

    def forward(**given: Any) -> Any:
        nonlocal calls
        if not one.acts or given["hidden_states"].shape[1] > 1:
            return compute(**given)
        calls += 1
        # Its name depends on the release.
        cache = next(one for one in given.values() if hasattr(one, "layers"))
        held = cache.layers[1].recurrent_states[0]
        before = held.clone()
        computed = compute(**given)
        if calls >= 10:
            held.copy_(before)
        return computed

    monkeypatch.setattr(layer, "forward", forward)
    one.broken = True
    answer = one.generate(one.prompts(2))
    one.broken = False
    assert calls > 20
    assert [found.verdict for found in one.verdicts()] == ["differs", "differs"]
    assert {(v.layer, v.rule) for v in one.guard.violations} == {(1, "state")}
    assert answer is not None


def test_states_that_are_ahead_of_the_tokens_are_not_compared(answers):
    """Where a row ends before the cache does, behind padding on the right, its state is not that of its last token."""
    one = answers("falcon_h1")
    one.taught()
    cache, ids = one.cache(), one.prompts(2, 60)
    mask = torch.ones_like(ids)
    mask[0, 50:] = 0
    one.call(cache, ids, attention_mask=mask)
    found = one.verdicts()
    assert [any("state" in layer.region for layer in answer.layers) for answer in found] == [False, True]
    assert [answer.verdict for answer in found] == ["same", "same"], found[0].table()
