"""The rules of attention that are read from a configuration, against what Transformers' models compute: each type of
model that is known, on each backend of a CPU that it can use, in a forward of two chunks."""

from typing import Any

import pytest
import torch
from canary_transformers import attention
from canary_transformers.second_forward import cache_argument
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from canary_adapters import ATTENTION_TYPES
from canary_core import AttentionRule
from canary_core.watchers.recompute.attention import AttentionLook

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=4, pad_token_id=0,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.5,
    num_local_experts=2, num_experts=2, num_experts_per_tok=1, sliding_window=24, decoder_sparse_step=1,
)  # fmt: skip
MLA = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "n_routed_experts": 2, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
MORE = {
    "deepseek_v2": {**MLA, "q_lora_rank": None},
    "deepseek_v3": {**MLA, "q_lora_rank": 40, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8}},
    "gemma2": {"query_pre_attn_scalar": 40, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"query_pre_attn_scalar": 40},
    "granite": {"attention_multiplier": 0.3},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "smollm3": {"use_sliding_window": True},
}
BACKENDS = ("eager", "sdpa")


def made(kind: str, backend: str) -> Any:
    """A tiny model; skips where its type can't use the backend."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **MORE.get(kind, {})})
    model = AutoModelForCausalLM.from_config(config).eval()
    try:
        model.set_attn_implementation(backend)
    except ValueError:
        pytest.skip(f"{kind} has no {backend} attention")
    if backend == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        pytest.skip("Transformers' sdpa has no soft cap")
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "sinks"):
                layer.self_attn.sinks.fill_(30.0)
    return model


def looked_at(model: Any, rules: Any) -> dict[int, Any]:
    """The verdict on each layer."""
    ids = torch.randint(3, 128, (1, 90), generator=torch.Generator().manual_seed(1))
    found = {}
    for layer, rule in rules.items():
        look = AttentionLook(layer, rule, torch.finfo(torch.float32).eps / 2)
        more = {cache_argument(model.model): DynamicCache(), "use_cache": True}
        with torch.no_grad(), attention.observed(model, look):
            model.model(input_ids=ids[:, :50], **more)
            model.model(input_ids=ids[:, 50:], **more)
        found[layer] = look.result()
        assert look.doubt is None
    return found


@pytest.mark.takes_turns("other types of models")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", sorted(ATTENTION_TYPES))
def test_each_known_type_computes_what_its_rule_says(kind, backend):
    """And another scale, or another window, is told."""
    model = made(kind, backend)
    rules = attention.rules(model)
    assert sorted(rules) == [0, 1, 2, 3]
    assert all(isinstance(rule, AttentionRule) for rule in rules.values())
    found = looked_at(model, rules)
    assert {layer: one for layer, one in found.items() if one.differs} == {}
    assert all(one.tokens == 90 for one in found.values())
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.02
    assert {one.deviation for one in looked_at(model, rules).values()} == {"scale"}


@pytest.mark.parametrize(
    ("kind", "name", "lacking"), [("gemma2", "soft_cap", "uncapped"), ("gpt_oss", "sinks", "no sink")]
)
def test_what_a_backend_leaves_out_is_told(kind, name, lacking, monkeypatch):
    """By name, in each layer."""
    model = made(kind, "eager")
    rules = attention.rules(model)
    for layer in model.model.layers:
        if kind == "gemma2":
            layer.self_attn.attn_logit_softcapping = None
    if kind == "gpt_oss":
        from transformers.models.gpt_oss import modeling_gpt_oss
        from transformers.models.llama.modeling_llama import eager_attention_forward

        monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", eager_attention_forward)
    found = looked_at(model, rules)
    assert {one.deviation for one in found.values()} == {name}
    assert all(lacking in one.detail for one in found.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_left_of_a_look(backend):
    """The functions of Transformers, and the hooks of the model, are as before; also after an error."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    model = made("llama", backend)
    look = AttentionLook(1, attention.rules(model)[1], 1e-7)
    before = dict(functions)
    with attention.observed(model, look):
        assert dict(functions) != before
    with pytest.raises(ValueError, match="input_ids"), attention.observed(model, look):
        model.model()
    assert dict(functions) == before
    assert functions._local_mapping == {}
    assert not model.model.layers[1].self_attn.v_proj._forward_hooks
