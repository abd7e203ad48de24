"""Tiny models with random weights, for the demo and the conformance suite. Imports the engine."""

import gc
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import transformers


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a tiny model. positions: its longest sequence, in tokens."""

    vocabulary: int
    positions: int
    window_tokens: int
    layers: int = 4


@lru_cache(maxsize=4)
def tiny_model(name: str, seed: int, sizes: Sizes) -> Any:
    """``llama`` with full attention everywhere, or ``gemma3`` with a sliding window on every other layer from the first
    on: ready for continuous batching, and large enough that answers differ. The same arguments give the same model."""
    options: dict[str, Any] = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": sizes.positions,
        "initializer_range": 0.5,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model_class: Any
    config: Any
    if name == "llama":
        model_class, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**options)
    else:
        layers = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(sizes.layers)]
        config = transformers.Gemma3TextConfig(**options, sliding_window=sizes.window_tokens, layer_types=layers)
        model_class = transformers.Gemma3ForCausalLM
    model = model_class(config)
    model.eval().set_attn_implementation("sdpa")
    return model


@lru_cache(maxsize=1)
def spare_the_collector() -> None:
    """Exempts all present objects from garbage collection. Each manager of continuous batching collects garbage at its
    end, at a higher cost than all of a tiny model's work; from here on only new objects are looked at."""
    gc.collect()
    gc.freeze()
