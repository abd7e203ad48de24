"""MLA in `generate()`: keys and values are computed from compressed KV, and attention of one layer in turns by the
model's configuration. The model is broken from outside, in all of its forwards."""

from typing import Any

import pytest
import torch

from canary_core import Kind

pytestmark = pytest.mark.usefixtures("one_thread")
BESIDE = pytest.mark.takes_turns("the same of DeepSeek-V2 in float32")
KINDS = [
    ("deepseek_v2", "float32"),
    pytest.param("deepseek_v3", "float32", marks=BESIDE),
    pytest.param("deepseek_v2", "bfloat16", marks=BESIDE),
]
LAYER = 1


def scale(one: Any, patch: pytest.MonkeyPatch) -> None:
    """Two per cent too large, in layer 1."""
    attention = one.model.model.layers[LAYER].self_attn
    patch.setattr(attention, "scaling", attention.scaling * 1.02)


def head(one: Any, patch: pytest.MonkeyPatch) -> None:
    """Each head of layer 1 reads the keys and values of the one beside it, once they are computed."""
    from transformers.integrations import sdpa_attention

    compute = sdpa_attention.sdpa_attention_forward
    wrong = one.model.model.layers[LAYER].self_attn

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        turned = (key.roll(1, 1), value.roll(1, 1)) if module is wrong else (key, value)
        return compute(module, query, *turned, *rest, **more)

    patch.setitem(_functions(), "sdpa", attend)


def _functions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS._global_mapping


def values(one: Any, patch: pytest.MonkeyPatch) -> None:
    """In layer 1 each head has another head's values, from its projection of the compressed KV."""
    attention = one.model.model.layers[LAYER].self_attn
    expand = attention.expand_kv

    def turned(*given: Any) -> Any:
        keys, found = expand(*given)
        return keys, found.roll(1, 1)

    patch.setattr(attention, "expand_kv", turned)


def keys(one: Any, patch: pytest.MonkeyPatch) -> None:
    """One number of the compressed KV of layer 1 is stored half as large again."""
    from transformers.cache_utils import Cache

    update = Cache.update

    def stored(self: Any, key: Any, value: Any, layer: int, *rest: Any, **more: Any) -> Any:
        if layer == LAYER:
            key = torch.cat((key[..., :1] * 1.5, key[..., 1:]), -1)
        return update(self, key, value, layer, *rest, **more)

    patch.setattr(Cache, "update", stored)


def every_layer(one: Any) -> list[Any]:
    """Verdicts on a row, one for each layer."""
    kept = one.generate(one.prompts())
    found = [answer for _ in one.model.model.layers for answer in one.verdicts()]
    assert kept is not None
    return found


@pytest.mark.parametrize(("kind", "floats"), KINDS)
@pytest.mark.parametrize("fault", [scale, head, values, keys])
def test_attention_that_is_wrong_on_every_path_is_found(fault, kind, floats, answers):
    """Within as many verifications as there are layers, in the broken layer and no other, with the deviation by its
    name; nothing before and after."""
    one = answers(kind, floats)
    clean(every_layer(one))
    with pytest.MonkeyPatch.context() as patch:
        fault(one, patch)
        found = every_layer(one)
    assert {answer.attention.layer: answer.attention.deviation for answer in found} == {
        0: None, LAYER: fault.__name__, 2: None,
    }  # fmt: skip
    told = [v for v in one.guard.violations if v.kind is Kind.ATTENTION]
    assert [(v.rule, v.layer) for v in told] == [(fault.__name__, LAYER)]
    clean(every_layer(one))


def clean(found: list[Any]) -> None:
    """Each layer had its turn, and is well."""
    assert [answer.table() for answer in found if answer.attention.differs] == []
    assert sorted(answer.attention.layer for answer in found) == [0, 1, 2]


@pytest.mark.parametrize(("kind", "floats"), KINDS)
def test_clean_answers_are_never_blamed(kind, floats, answers):
    """Of several rows, in chunks and with static caches: 40 looks at attention."""
    one = answers(kind, floats)
    one.taught()
    for settings in ({"do_sample": True}, {"prefill_chunk_size": 16, "cache_implementation": "static"}) * 2:
        kept = one.generate(one.prompts(9), max_new_tokens=20, **settings)
        found = one.verdicts()
        assert kept is not None
        assert [answer.table() for answer in found if answer.verdict == "differs"] == []
    stats = one.guard.stats()
    assert (stats["attention_layers"], stats["attention_looks"]) == (3, 40)
    assert "attention_differs" not in stats
    assert one.guard.violations == []
