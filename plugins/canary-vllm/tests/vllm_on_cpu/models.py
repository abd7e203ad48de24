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
    # Of two ranks both hold its only KV head.
    "llama_1_head": dict(LLAMA, num_key_value_heads=1),
    "llama_1": dict(LLAMA, num_hidden_layers=1),
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
    # By default its drafter would read layers that a model of two has not.
    "llama_eagle3": dict(LLAMA, num_hidden_layers=1, eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
    "glm4_moe": dict(
        architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", hidden_act="silu", num_nextn_predict_layers=1,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64,
        first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False,
        attention_bias=False, use_qk_norm=False, partial_rotary_factor=1.0,
    ),
    # Three layers of chunks of 64 tokens, then one of all.
    "llama4": dict(
        architectures=["Llama4ForCausalLM"], model_type="llama4_text", hidden_act="silu", num_hidden_layers=4,
        attention_chunk_size=64, no_rope_layers=[1, 1, 1, 0], layer_types=["chunked_attention"] * 3 + [FULL],
        intermediate_size_mlp=128, num_local_experts=2, num_experts_per_tok=1, interleave_moe_layer_step=0,
        moe_layers=[], use_qk_norm=True, attn_temperature_tuning=False,
    ),
    # vLLM's own scan for CPUs takes a prompt in one chunk.
    "mamba2": dict(
        architectures=["Mamba2ForCausalLM"], model_type="mamba2", hidden_act="silu", num_heads=4, n_groups=1,
        state_size=16, conv_kernel=4, expand=2, chunk_size=256, use_conv_bias=True, use_bias=False,
        layer_norm_epsilon=1e-5,
    ),
    "falcon_h1": dict(
        architectures=["FalconH1ForCausalLM"], model_type="falcon_h1", hidden_act="silu", mamba_n_heads=4,
        mamba_d_head=32, mamba_d_ssm=128, mamba_n_groups=1, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
        mamba_chunk_size=256,
    ),
    "lfm2": dict(
        architectures=["Lfm2ForCausalLM"], model_type="lfm2", num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, layer_types=["conv", FULL, "conv", FULL], conv_L_cache=3, conv_bias=False, block_dim=64,
        conv_dim=64, norm_eps=1e-5, block_ff_dim=128, block_multiple_of=32, block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    ),
    "qwen3_next": dict(
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", hidden_act="silu", num_hidden_layers=4,
        torch_dtype="bfloat16", layer_types=["linear_attention"] * 3 + [FULL], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        num_experts=2, num_experts_per_tok=1, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=64,
        shared_expert_intermediate_size=64, partial_rotary_factor=0.5, full_attention_interval=4,
    ),
}  # fmt: skip


def folder(name: str, root: Path) -> str:
    """The folder of one of `MODELS`, made in ``root``."""
    config = {**COMMON, **MODELS[name]}
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(path)
