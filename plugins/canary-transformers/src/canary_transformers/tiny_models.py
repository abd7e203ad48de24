"""Tiny models with random weights, on which the demo and the conformance suite run. Imports the engine."""

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import transformers

MODELS = ("llama", "gemma3")


@lru_cache(maxsize=4)
def tiny_model(name: str, seed: int, vocabulary: int, positions: int, window_tokens: int) -> Any:
    """``llama`` with full attention everywhere, or ``gemma3`` with a sliding window on every second layer: 4 layers,
    ready for continuous batching, and large enough that answers differ."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": positions,
        "initializer_range": 0.5,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model_class: Any
    config: Any
    if name == "llama":
        model_class, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes)
    else:
        layers = ["sliding_attention", "full_attention"] * 2
        config = transformers.Gemma3TextConfig(**sizes, sliding_window=window_tokens, layer_types=layers)
        model_class = transformers.Gemma3ForCausalLM
    model = model_class(config)
    model.eval().set_attn_implementation("sdpa")
    return model


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
