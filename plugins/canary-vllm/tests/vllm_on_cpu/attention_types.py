"""Tiny checkpoints of the types of models whose attention has a rule, with weights at which it matters."""

import tempfile
from typing import Any

import torch

WINDOW = 48
SIZES: dict[str, Any] = dict(
    vocab_size=512, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2, pad_token_id=0,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.3,
    num_local_experts=2, num_experts=2, num_experts_per_tok=1, sliding_window=WINDOW, decoder_sparse_step=1,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
NONE = {"sliding_window": None}
ALL = {"use_sliding_window": True, "max_window_layers": 0}
"""vLLM's own models of Qwen have a window in all layers, or in none."""
QWEN2 = {**ALL, "num_attention_heads": 2, "num_key_value_heads": 1}
MLA = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 48, "num_key_value_heads": 4,
    "head_dim": 64, "first_k_dense_replace": 8, "n_routed_experts": 2, "n_group": 1, "topk_group": 1,
    "initializer_range": 0.1,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        "mscale": 0.8, "mscale_all_dim": 0.8,
    },
}  # fmt: skip
"""vLLM's decodes on a CPU have one size of compressed KV."""
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**MLA, "q_lora_rank": None},
    "deepseek_v3": {**MLA, "q_lora_rank": 40},
    "gemma2": {"query_pre_attn_scalar": 40, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"query_pre_attn_scalar": 40},
    "gpt_oss": {},
    "granite": {"attention_multiplier": 0.3, **NONE},
    "llama": NONE,
    "mistral": {},
    "mixtral": {},
    "olmo2": NONE,
    "qwen2": QWEN2,
    "qwen2_moe": {**QWEN2, "shared_expert_intermediate_size": 64},
    "qwen3": ALL,
    "qwen3_moe": {"use_sliding_window": True},
    "smollm3": {"use_sliding_window": True},
}


def checkpoint(kind: str, layers: int = 2, **more: Any) -> str:
    """The folder of one. ``more``: of the configuration."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **MORE[kind], "num_hidden_layers": layers, **more})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(3.0)
    folder = tempfile.mkdtemp(prefix=f"{kind}-")
    model.save_pretrained(folder)
    return folder
