"""Configurations of tiny models, one of each type whose attention has a rule."""

from typing import Any

WINDOW = 24
SIZES: dict[str, Any] = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-6,
    hidden_act="silu", hidden_activation="gelu_pytorch_tanh", num_local_experts=2, num_experts=2,
    num_experts_per_tok=1, decoder_sparse_step=1, shared_expert_intermediate_size=64, rope_theta=10000.0,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="float32", tie_word_embeddings=True,
)  # fmt: skip
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MLA: dict[str, Any] = dict(
    num_key_value_heads=4, head_dim=32, kv_lora_rank=256, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=16,
    n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=3, moe_layer_freq=1,
    routed_scaling_factor=1.0, norm_topk_prob=False, tie_word_embeddings=False, attention_bias=False,
)  # fmt: skip
"""Sizes that Triton's kernels take; no layer has experts."""
# Without YaRN, SGLang has no rotation of DeepSeek's on a CPU.
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=32, beta_slow=1)
TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **MLA, "q_lora_rank": None, "scoring_func": "softmax", "topk_method": "greedy",
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        **MLA, "q_lora_rank": 48, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gemma2": {
        "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": None,
        "hidden_act": "gelu_pytorch_tanh", **MIXED,
    },
    "gemma3_text": {"query_pre_attn_scalar": 20, **MIXED},
    "gpt_oss": {"swiglu_limit": 7.0, **MIXED},
    "granite": {
        "attention_multiplier": 0.3, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
    },
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "olmo2": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "smollm3": {"layer_types": ["full_attention"] * 3},
}  # fmt: skip
IN_TRITON = frozenset({"deepseek_v2", "deepseek_v3", "gemma2", "gpt_oss", "qwen2_moe"})
"""Types that SGLang needs Triton for; on a CPU its interpreter, in which floats of 32 bits are right."""
CLASSES = {
    "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3",
    "gemma2": "Gemma2", "gemma3_text": "Gemma3", "gpt_oss": "GptOss", "granite": "Granite", "llama": "Llama",
    "mistral": "Mistral", "mixtral": "Mixtral", "olmo2": "Olmo2", "qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "smollm3": "SmolLM3",
}  # fmt: skip
WINDOWED = {"mistral_window": ("mistral", {"sliding_window": WINDOW}), "smollm3_window": ("smollm3", MIXED)}
WINDOWED["gpt_oss_window"] = ("gpt_oss", {"sliding_window": 2 * WINDOW})
"""Windows have a pool of their own, with room for a verdict."""
ATTENTION_MODELS = {
    f"{name}_attention": {
        **SIZES, "architectures": [f"{CLASSES[kind]}ForCausalLM"], "model_type": kind, **TYPES[kind], **more,
    }
    for name, (kind, more) in {**{kind: (kind, {}) for kind in TYPES}, **WINDOWED}.items()
}  # fmt: skip
