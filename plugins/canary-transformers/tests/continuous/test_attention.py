"""One layer's attention is computed a second time in plain torch, in turns: what is wrong on every path alike is found.
The model is broken from outside, in all of its forwards."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from canary_transformers.tiny_models import tiny_model
from tiny.verified import Verified

from canary_core import Kind

pytestmark = pytest.mark.usefixtures("one_thread")
LAYER = 1


@pytest.fixture
def engine(guard: Callable[..., Any]) -> Iterator[Callable[..., Verified]]:
    """Makes one."""
    made: list[Verified] = []

    def make(*args: Any, **kwargs: Any) -> Verified:
        made.append(Verified(guard, *args, **kwargs))
        return made[-1]

    yield make
    for verified in made:
        verified.engine.close()


def calm(*args: Any) -> Any:
    """With logits no larger than those of real models: in 16 bits rounding hides less of what is wrong."""
    model = copy.deepcopy(tiny_model(*args))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(0.25)
            layer.self_attn.k_proj.weight.mul_(0.25)
    return model


def every_layer(verified: Verified, new: int = 60) -> list[Any]:
    """Verifications of a request, one for each layer."""
    verified.submit("asked", new=new)
    verified.step(50)
    return [verified.answer("asked") for _ in verified.model.model.layers]


def scale(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """Two per cent too large."""
    attention = verified.model.model.layers[LAYER].self_attn
    patch.setattr(attention, "scaling", attention.scaling * 1.02)


def window(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """One token shorter than the configuration says."""
    overlay = transformers.masking_utils.sliding_window_overlay
    patch.setattr(transformers.masking_utils, "sliding_window_overlay", lambda size, *rest: overlay(size - 1, *rest))


def head(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """Each group of heads reads the other group's keys and values."""
    from transformers.integrations import sdpa_attention

    repeat = sdpa_attention.repeat_kv
    patch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda *given: False)
    patch.setattr(sdpa_attention, "repeat_kv", lambda kv, times: repeat(kv.roll(1, 1), times))


def values(verified: Verified, patch: pytest.MonkeyPatch) -> None:
    """K and V are exchanged when they are stored."""
    from transformers import cache_utils

    update = cache_utils.DynamicLayer.update
    patch.setattr(cache_utils.DynamicLayer, "update", lambda self, k, v, *a, **kw: update(self, v, k, *a, **kw))


@pytest.mark.parametrize(
    ("fault", "setup", "layers"),
    [
        (scale, {}, {LAYER}),
        (scale, {"dtype": torch.bfloat16, "make": calm}, {LAYER}),
        (window, {"name": "gemma3"}, {0, 2}),
        (head, {}, {0, 1, 2}),
        (values, {}, {0, 1, 2}),
    ],
)
def test_attention_that_is_wrong_on_every_path_is_found(fault, setup, layers, engine, monkeypatch):
    """Within as many verifications as there are layers, each broken layer and no other, with the deviation by its name;
    and nothing before."""
    verified = engine(**setup)
    before = every_layer(verified)
    verified.finish()
    assert sorted(answer.attention.layer for answer in before) == list(range(len(before)))
    assert [answer.table() for answer in before if answer.attention.differs] == []
    fault(verified, monkeypatch)
    after = every_layer(verified)
    assert {answer.attention.layer for answer in after if answer.attention.differs} == layers
    found = [v for v in verified.guard.violations if v.kind is Kind.ATTENTION]
    # Those of further layers are the same finding again.
    assert [(v.rule, v.layer, v.request) for v in found] == [(fault.__name__, min(layers), "asked")]
    differing = [answer for answer in after if answer.attention.differs]
    assert {(answer.verdict, answer.attention.deviation) for answer in differing} == {("differs", fault.__name__)}
    verified.guard._sessions[0].drain()
    named = [
        event.fields for event in verified.findings.told("diagnosis") if event.fields["diagnosis"] == "wrong_attention"
    ]
    assert named


@pytest.mark.parametrize("setup", [{}, {"name": "gemma3"}, {"dtype": torch.bfloat16}])
def test_clean_traffic_is_never_blamed(setup, engine):
    """Each layer again and again, in mixed batches, by as many looks as verdicts."""
    verified = engine(**setup)
    verified.taught()
    verified.traffic(2)
    stats = verified.guard.stats()
    assert stats["attention_layers"] == len(verified.model.model.layers)
    assert stats["attention_looks"] > 12
    assert "attention_differs" not in stats
    assert verified.guard.violations == []


def test_a_model_of_another_type_has_no_reference_and_says_so(engine, monkeypatch):
    """By an event, once, and a counter that stays zero."""
    verified = engine()
    monkeypatch.setattr(verified.model.config, "model_type", "unheard_of")
    answers = every_layer(verified)
    assert [answer.attention for answer in answers] == [None] * len(answers)
    told = [
        event.fields["reason"] for event in verified.findings.told("unjudged") if "attention" in event.fields["reason"]
    ]
    assert len(told) == 1
    assert "layer 0, 1, 2 has no reference" in told[0]
    assert "unheard_of" in told[0]
    assert verified.guard.stats().get("attention_layers", 0) == 0
    doubts = [item["name"] for item in verified.findings.told("coverage")[-1].fields["uncovered"]]
    assert doubts == ["reference of attention in layer 0, 1, 2"]
