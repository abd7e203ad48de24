"""What models are asked to generate under guard, and what is done to their caches."""

from inspect import signature
from typing import Any

import torch
from canary_transformers import guard
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache

from canary_core.testing import Findings

CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""The name of a model's argument for its cache in the installed release."""

LOOP = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]])
"""A prompt that repeats itself, so that prompt lookup has something to propose."""


def listening(model: Any, **config: Any) -> tuple[Any, Findings]:
    """A guard that reads every byte before it is used, and what it is told."""
    watch = guard(model, **{"read_check": -1, "log_level": "error", **config})
    findings = Findings()
    watch.register(findings)
    return watch, findings


def generate(model: Any, ids: torch.Tensor, **settings: Any) -> Any:
    """What the model makes of `ids`, seeded."""
    torch.manual_seed(1)
    config = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **settings}
    inputs = {k: config.pop(k) for k in ("attention_mask", "inputs_embeds") if k in config}
    if "cache" in config:
        inputs[CACHE] = config.pop("cache")
    return model.generate(ids, generation_config=GenerationConfig(**config), **inputs)


def prompts(rows: int = 2, tokens: int = 11) -> torch.Tensor:
    """Always the same random tokens."""
    return torch.randint(3, 250, (rows, tokens), generator=torch.Generator().manual_seed(7))


def forwards(model: Any, cache: Any, *chunks: torch.Tensor) -> list[torch.Tensor]:
    """Feeds chunk after chunk by hand; gives the logits."""
    with torch.no_grad():
        return [model(input_ids=chunk, **{CACHE: cache}).logits for chunk in chunks]


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
