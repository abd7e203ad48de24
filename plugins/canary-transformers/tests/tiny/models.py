"""Tiny models with random weights, the same ones each time."""

import functools
from typing import Any

import torch
import transformers

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 8
"""Of models of `generating`."""

ANSWERING_WINDOW = 40
"""Of models of `answering`: enough resident tokens for a verdict."""

ENCODING = ("bart", "t5", "whisper")
"""Models with an encoder and a decoder."""

STATES = 11
"""States of the encoder, for `generation.prompts`; Whisper has half as many as frames."""

TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.5,
    "pad_token_id": 0,
}  # fmt: skip

LAYERS = 4
"""Of models of `batching`."""


@functools.cache
def batching(kind: str) -> Any:
    """For continuous batching: ``llama``, ``mistral``, ``qwen3`` or ``gemma3``, with windows of 12 tokens."""
    sizes = {**TINY, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    layers = [SLIDING, FULL, SLIDING, SLIDING]
    made = _make(kind, {**sizes, "num_hidden_layers": LAYERS}, 12, layers)
    made.set_attn_implementation("sdpa")
    return made


@functools.cache
def generating(kind: str) -> Any:
    """For `generate()`: the same kinds, smaller still, with windows of `WINDOW` tokens; or one with an encoder."""
    return encoding(kind) if kind in ENCODING else _make(kind, TINY, WINDOW, [SLIDING, SLIDING, FULL])


@functools.cache
def answering(kind: str, floats: str = "float32") -> Any:
    """For `generate()` that is verified: with windows of `ANSWERING_WINDOW` tokens."""
    sizes = {**TINY, "hidden_size": 64, "head_dim": 16}
    if kind in HYBRID:
        made = _hybrid(kind, {**sizes, "num_hidden_layers": 4, "initializer_range": 0.3})
    else:
        made = _make(kind, sizes, ANSWERING_WINDOW, [SLIDING, FULL, SLIDING])
    return made.to(getattr(torch, floats))


_MLA = {
    "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "head_dim": 8, "first_k_dense_replace": 3, "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0,
        "mscale": 0.8, "mscale_all_dim": 0.8,
    },
}  # fmt: skip
"""Layers without experts, whose choice would hide what is wrong in 16 bits."""


def _make(kind: str, sizes: dict[str, Any], window: int, layers: list[str]) -> Any:
    config, model, extra = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": window}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
        "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**_MLA, "q_lora_rank": None}),
        "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_MLA, "q_lora_rank": 40}),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": window, "layer_types": layers}),
    }[kind]  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **extra})).eval()


_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}
_CONV = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}

HYBRID: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bamba": ("BambaConfig", "BambaForCausalLM", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", {**_MAMBA, "mamba_d_ssm": 128}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA, "mamba_expand": 2, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 48, "embedding_multiplier": 1.0,
            "position_embedding_type": "rope",
        },
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 8,
        },
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {**_CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", {**_CONV, **_EXPERTS, "num_dense_layers": 1}),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "attention"] * 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
            "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 32, "expand": 2,
        },
    ),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", _DELTA),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _SHARED),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _SHARED),
}  # fmt: skip
"""Models with recurrent layers, by kind: config, model, and special sizes."""

_OWN_HEADS = ("falcon_h1", "qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h")
"""Those of `HYBRID` with a size of heads of their own."""


def _hybrid(kind: str, sizes: dict[str, Any]) -> Any:
    """Of `HYBRID`, with four layers, of which attention is in the second and the last, or in all."""
    config, model, extra = HYBRID[kind]
    if kind not in _OWN_HEADS:
        sizes = {name: size for name, size in sizes.items() if name != "head_dim"}
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **extra})).eval()


def encoding(kind: str) -> Any:
    """A model of `ENCODING` with two layers; Whisper takes `STATES` states."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    bart = {
        "vocab_size": 256, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, **special,
    }  # fmt: skip
    config, made, sizes = {
        "bart": ("BartConfig", "BartForConditionalGeneration", {**bart, "max_position_embeddings": 128}),
        "t5": (
            "T5Config",
            "T5ForConditionalGeneration",
            {"vocab_size": 256, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, **special},
        ),
        "whisper": (
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            {**bart, "num_mel_bins": 8, "max_source_positions": STATES, "suppress_tokens": None, "init_std": 0.5},
        ),
    }[kind]
    torch.manual_seed(0)
    return getattr(transformers, made)(getattr(transformers, config)(**sizes)).eval()
