"""Tiny random models, and what they generate under guard."""

import functools
from typing import Any

import torch
from canary_transformers import guard
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DynamicCache, StaticCache

from canary_core import Event, hookimpl

TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.5,
    "pad_token_id": 0,
}  # fmt: skip
WINDOW = 8
LOOP = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])
"""A prompt that repeats itself, so that prompt lookup has something to propose."""


@functools.cache
def build(name: str) -> Any:
    """The tiny model of that name, random weights, made once."""
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**TINY, sliding_window=WINDOW)).eval()
    if name == "gemma3":
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**TINY, sliding_window=WINDOW, layer_types=layers)
        return Gemma3ForCausalLM(config).eval()
    return Qwen3ForCausalLM(Qwen3Config(**TINY)).eval()


class Listener:
    def __init__(self) -> None:
        self.events: list[Event] = []

    @hookimpl
    def canary_event(self, event: Event) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [e.fields for e in self.events if e.name == name]


def listening(model: Any, **config: Any) -> tuple[Any, Listener]:
    """A guard that reads every byte before it is used, and who hears its events."""
    watch = guard(model, **{"read_check": -1, "log_level": "error", **config})
    listener = Listener()
    watch.register(listener)
    return watch, listener


def generate(model: Any, ids: torch.Tensor, **settings: Any) -> Any:
    """What the model makes of `ids`, seeded."""
    torch.manual_seed(1)
    config = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **settings}
    inputs = {k: config.pop(k) for k in ("attention_mask", "past_key_values", "inputs_embeds") if k in config}
    return model.generate(ids, generation_config=GenerationConfig(**config), **inputs)


def prompts(rows: int = 2, tokens: int = 11) -> torch.Tensor:
    """Always the same random tokens."""
    return torch.randint(3, 250, (rows, tokens), generator=torch.Generator().manual_seed(7))


def forwards(model: Any, cache: Any, *chunks: torch.Tensor) -> list[torch.Tensor]:
    """Feeds chunk after chunk by hand; gives the logits."""
    with torch.no_grad():
        return [model(input_ids=chunk, past_key_values=cache).logits for chunk in chunks]


def new_cache(model: Any, kind: str) -> Any:
    """An empty cache."""
    return StaticCache(config=model.config, max_cache_len=40) if kind == "static" else DynamicCache(config=model.config)


def flip(cache: Any, layer: int, half: str, row: int, index: int) -> None:
    """One bit of the last head, at an index of the tensor."""
    getattr(cache.layers[layer], half)[row, -1, index].view(torch.uint8)[3] ^= 1


def expect_clean(watch: Any) -> dict[str, int]:
    """Nothing found, nothing explained away; gives the counters."""
    assert [str(v) for v in watch.violations] == []
    stats: dict[str, int] = watch.stats()
    assert stats["violations"] == 0
    assert stats["dismissed"] == 0
    return stats
