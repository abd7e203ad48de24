"""Models for tests on a GPU: a few MB each, in the shapes that SGLang's GPU kernels take."""

from typing import Any

_BASE: dict[str, Any] = dict(
    vocab_size=32000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=10000.0,
    hidden_act="silu", bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16", tie_word_embeddings=False,
)  # fmt: skip
_YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=1024, beta_fast=32, beta_slow=1)
_EXPERTS = dict(
    n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, moe_layer_freq=1, attention_bias=False
)

GPU_MODELS: dict[str, dict[str, Any]] = {
    "gpu_llama": dict(_BASE, architectures=["LlamaForCausalLM"], model_type="llama"),
    "gpu_llama_small": dict(_BASE, architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=1),
    "gpu_llama_draft": dict(
        _BASE, architectures=["LlamaForCausalLMEagle"], model_type="llama", num_hidden_layers=1
    ),
    "gpu_cohere2": dict(
        _BASE, architectures=["Cohere2ForCausalLM"], model_type="cohere2", sliding_window=128,
        sliding_window_pattern=2, layer_types=["sliding_attention", "full_attention"] * 2, layer_norm_eps=1e-5,
        logit_scale=1.0, is_hybrid_swa=True, hybrid_layer_pattern=[1, 0, 1, 0], pad_token_id=0,
    ),
    "gpu_deepseek_v2": dict(
        _BASE, **_EXPERTS, n_routed_experts=4, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2",
        num_key_value_heads=8, moe_intermediate_size=128, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=4, routed_scaling_factor=1.0,
        norm_topk_prob=False, scoring_func="softmax", topk_method="greedy",
        rope_scaling=dict(_YARN, mscale=0.707, mscale_all_dim=0.707),
    ),
    "gpu_qwen3_5": dict(
        _BASE, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", full_attention_interval=2,
        partial_rotary_factor=0.5, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "gpu_kimi_linear": dict(
        _BASE, architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", num_key_value_heads=8,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        mla_use_nope=True, first_k_dense_replace=4, moe_layer_freq=1, num_experts=4, num_experts_per_token=2,
        num_shared_experts=1, moe_intermediate_size=128, moe_renormalize=True, routed_scaling_factor=1.0,
        moe_router_activation_func="sigmoid", num_expert_group=1, topk_group=1, use_grouped_topk=True,
        linear_attn_config=dict(
            kda_layers=[1, 3, 4], full_attn_layers=[2], num_heads=4, head_dim=128, short_conv_kernel_size=4
        ),
    ),
    "gpu_falcon_h1": dict(
        _BASE, architectures=["FalconH1ForCausalLM"], model_type="falcon_h1", mamba_d_ssm=512, mamba_n_heads=8,
        mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4, mamba_expand=1, mamba_chunk_size=128,
    ),
    "gpu_deepseek_v32": dict(
        _BASE, **_EXPERTS, n_routed_experts=4, architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32",
        hidden_size=1024, num_attention_heads=64, num_key_value_heads=64, moe_intermediate_size=256, kv_lora_rank=512,
        q_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, index_head_dim=128,
        index_n_heads=64, index_topk=2048, first_k_dense_replace=4, routed_scaling_factor=1.0, norm_topk_prob=False,
        scoring_func="sigmoid", topk_method="noaux_tc", rope_scaling=dict(_YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
    "gpu_deepseek_v4": dict(
        _BASE, **_EXPERTS, n_routed_experts=8, architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4",
        hidden_size=1024, num_attention_heads=64, num_key_value_heads=1, head_dim=512, moe_intermediate_size=256,
        kv_lora_rank=512, q_lora_rank=256, o_lora_rank=256, o_groups=8, qk_nope_head_dim=448, qk_rope_head_dim=64,
        v_head_dim=512, index_head_dim=128, index_n_heads=64, index_topk=512, window_size=128, sliding_window=128,
        compress_ratios=[4, 128, 4, 128], compress_rope_theta=40000, topk_method="noaux_tc",
        scoring_func="sqrtsoftplus", norm_topk_prob=True, routed_scaling_factor=1.5, first_k_dense_replace=0,
        hc_mult=4, hc_sinkhorn_iters=2, hc_eps=1e-6, num_hash_layers=0, swiglu_limit=10.0, rope_scaling=_YARN,
        quantization_config=dict(
            quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128]
        ),
    ),
}  # fmt: skip

GPU_DEFAULTS: dict[str, Any] = dict(
    device="cuda", load_format="dummy", skip_tokenizer_init=True, attention_backend="triton",
    sampling_backend="pytorch", grammar_backend="none", cuda_graph_max_bs_decode=8,
    cuda_graph_backend_prefill="disabled", log_level="warning", random_seed=1, mem_fraction_static=0.5,
    max_total_tokens=8192, max_running_requests=8, chunked_prefill_size=256, disable_custom_all_reduce=True,
    disable_overlap_schedule=True,
)  # fmt: skip
"""`ServerArgs` of an engine on a GPU: CUDA graphs for decoding, small pools. Several such engines may share a GPU: the
share of its memory is only what an engine may see taken while it starts."""
