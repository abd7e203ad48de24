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
    made = _make(kind, {**TINY, "hidden_size": 64, "head_dim": 16}, ANSWERING_WINDOW, [SLIDING, FULL, SLIDING])
    return made.to(getattr(torch, floats))


def _make(kind: str, sizes: dict[str, Any], window: int, layers: list[str]) -> Any:
    config, model, extra = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": window}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": window, "layer_types": layers}),
    }[kind]  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes, **extra)).eval()


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
