"""Tiny models with random weights, the same ones each time."""

import functools
from typing import Any

import torch
import transformers

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 8
"""Of models of `generating`."""

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
    """For `generate()`: the same kinds, smaller still, with windows of `WINDOW` tokens."""
    return _make(kind, TINY, WINDOW, [SLIDING, SLIDING, FULL])


def _make(kind: str, sizes: dict[str, Any], window: int, layers: list[str]) -> Any:
    config, model, extra = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": window}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": window, "layer_types": layers}),
    }[kind]  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes, **extra)).eval()
