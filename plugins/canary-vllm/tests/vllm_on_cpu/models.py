"""Models small enough for a CPU: folders with nothing but a config.json, for which vLLM makes weights up."""

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = dict(
    vocab_size=512, bos_token_id=1, eos_token_id=2, torch_dtype="float32", initializer_range=0.3, rms_norm_eps=1e-5,
    tie_word_embeddings=False, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, rope_theta=10000.0,
)  # fmt: skip
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu")
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": dict(LLAMA, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=48),
    "gemma3": dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=4, query_pre_attn_scalar=32, sliding_window=48, rope_local_base_freq=10000.0,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
    ),
    "deepseek": dict(
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", hidden_act="silu", torch_dtype="bfloat16",
        num_key_value_heads=4, head_dim=None, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=128, first_k_dense_replace=8, topk_method="greedy", n_group=1, topk_group=1,
        routed_scaling_factor=1.0, scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1,
    ),
}  # fmt: skip


def folder(name: str, root: Path) -> str:
    """The folder of one of `MODELS`, made in ``root``."""
    config = {**COMMON, **MODELS[name]}
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(path)
