"""Models for vLLM on a GPU: two layers in the shapes that its GPU kernels take, so that a decode is as short as an
engine makes it. Folders with nothing but a config.json."""

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0,
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, torch_dtype="bfloat16",
)  # fmt: skip
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu")
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": dict(LLAMA, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=128),
    "gemma3": dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=64, sliding_window=128, rope_local_base_freq=10000.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    # Three layers of chunks of 128 tokens, then one of all.
    "llama4": dict(
        architectures=["Llama4ForCausalLM"], model_type="llama4_text", hidden_act="silu", num_hidden_layers=4,
        attention_chunk_size=128, no_rope_layers=[1, 1, 1, 0],
        layer_types=["chunked_attention"] * 3 + ["full_attention"], intermediate_size_mlp=512, num_local_experts=2,
        num_experts_per_tok=1, interleave_moe_layer_step=0, moe_layers=[], use_qk_norm=True,
        attn_temperature_tuning=False,
    ),
    "deepseek": dict(
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", hidden_act="silu", kv_lora_rank=512,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=512, first_k_dense_replace=8,
        topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0, scoring_func="softmax",
        norm_topk_prob=False, moe_layer_freq=1, num_attention_heads=16, num_key_value_heads=16, head_dim=None,
    ),
    "falcon_h1": dict(
        architectures=["FalconH1ForCausalLM"], model_type="falcon_h1", hidden_act="silu", mamba_n_heads=8,
        mamba_d_head=64, mamba_d_ssm=512, mamba_n_groups=1, mamba_d_state=64, mamba_d_conv=4, mamba_expand=2,
        mamba_chunk_size=256,
    ),
}  # fmt: skip


def folder(name: str, root: Path) -> str:
    """The folder of one of `MODELS`, made in ``root``."""
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**COMMON, **MODELS[name]}.items() if value is not None}
    path.joinpath("config.json").write_text(json.dumps(config))
    return str(path)
