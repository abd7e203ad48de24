"""Configurations of tiny models that SGLang serves on a CPU."""

from typing import Any

LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=128,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", bos_token_id=1, eos_token_id=2, dtype="bfloat16",
    tie_word_embeddings=False,
)  # fmt: skip
COHERE2 = dict(
    architectures=["Cohere2ForCausalLM"], model_type="cohere2", vocab_size=256, hidden_size=64, intermediate_size=128,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window_pattern=2,
    rope_theta=10000.0, layer_norm_eps=1e-5, logit_scale=1.0, hidden_act="silu", dtype="bfloat16", bos_token_id=1,
    eos_token_id=2, pad_token_id=0, tie_word_embeddings=True, is_hybrid_swa=True, hybrid_layer_pattern=[1, 0, 1, 0],
)  # fmt: skip
DEEPSEEK_V2 = dict(
    architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", vocab_size=256, hidden_size=64,
    intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    kv_lora_rank=256, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=16, n_routed_experts=4,
    n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2, moe_layer_freq=1,
    routed_scaling_factor=1.0, norm_topk_prob=False, scoring_func="softmax", topk_method="greedy",
    max_position_embeddings=512, rope_theta=10000.0,
    rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=32, beta_slow=1, mscale=0.707,
        mscale_all_dim=0.707,
    ),
    rms_norm_eps=1e-6, dtype="bfloat16", hidden_act="silu", bos_token_id=1, eos_token_id=2, attention_bias=False,
    tie_word_embeddings=False,
)  # fmt: skip
DEEPSEEK_V4 = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", vocab_size=256, hidden_size=64,
    intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1,
    kv_lora_rank=512, q_lora_rank=32, o_lora_rank=32, o_groups=2, qk_nope_head_dim=448, qk_rope_head_dim=64,
    v_head_dim=512, head_dim=512, index_head_dim=128, index_n_heads=4, index_topk=512, n_routed_experts=4,
    n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, window_size=128, sliding_window=128,
    compress_ratios=[4, 128, 4, 128], compress_rope_theta=40000, topk_method="noaux_tc", scoring_func="sqrtsoftplus",
    norm_topk_prob=True, routed_scaling_factor=1.5, first_k_dense_replace=0, moe_layer_freq=1,
    tie_word_embeddings=False, attention_bias=False, max_position_embeddings=4096, rope_theta=10000,
    rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=32, beta_slow=1),
    rms_norm_eps=1e-6, dtype="bfloat16", hidden_act="silu", bos_token_id=1, eos_token_id=2, hc_mult=4,
    hc_sinkhorn_iters=2, hc_eps=1e-6, num_hash_layers=0, swiglu_limit=10.0,
)  # fmt: skip
QWEN2_VL = dict(
    architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl", vocab_size=256, hidden_size=64,
    intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu",
    max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=10000.0, dtype="bfloat16", bos_token_id=1,
    eos_token_id=2, vision_start_token_id=252, vision_end_token_id=253, vision_token_id=254, image_token_id=255,
    video_token_id=251, tie_word_embeddings=False, rope_scaling=dict(type="mrope", mrope_section=[2, 3, 3]),
    vision_config=dict(
        depth=1, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, in_chans=3, patch_size=14,
        spatial_merge_size=2, temporal_patch_size=2,
    ),
)  # fmt: skip
QWEN3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
}
LLAMA_SMALL: dict[str, Any] = {**LLAMA, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA_DRAFT: dict[str, Any] = {**LLAMA_SMALL, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
CPU_MODELS = {
    "llama": LLAMA,
    "llama_small": LLAMA_SMALL,
    "llama_draft": LLAMA_DRAFT,
    "cohere2": COHERE2,
    "deepseek_v2": DEEPSEEK_V2,
    "qwen2_vl": QWEN2_VL,
    "qwen3": QWEN3,
    "deepseek_v4": DEEPSEEK_V4,
}

CPU_DEFAULTS = dict(
    skip_tokenizer_init=True, device="cpu", attention_backend="torch_native", load_format="dummy",
    max_total_tokens=512, max_running_requests=4, chunked_prefill_size=64, disable_overlap_schedule=True,
    grammar_backend="none", disable_cuda_graph=True, random_seed=0, log_level="warning", mem_fraction_static=0.5,
)  # fmt: skip
"""`ServerArgs` of an engine on a CPU."""
