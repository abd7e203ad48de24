"""Traffic for continuous batching, and objects that act in the middle of it."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from canary_core import hookimpl
from tiny.models import LAYERS, batching

PAGE = 8
SETTINGS = {f.name for f in fields(ContinuousBatchingConfig)}

HAS_POOL = "page_size" in SETTINGS
"""Whether the cache starts cleared, and has a pool that blocks go back to: from 5.18 on."""


@dataclass(frozen=True)
class Traffic:
    """What to serve: ``requests`` random prompts, half of them with a shared prefix, and how tight the engine is."""

    seed: int = 0
    requests: int = 8
    new_tokens: int = 10
    samples: int = 1
    pages: int = 40
    batch_tokens: int = 48
    options: dict[str, Any] = field(default_factory=dict)

    def prompts(self) -> list[list[int]]:
        """Prompts of 1 to 60 tokens; longer than a batch now and then, so that prefills are chunked."""
        r = random.Random(self.seed)
        shared = [r.randrange(3, 500) for _ in range(40)]
        long = [[r.randrange(3, 500) for _ in range(60)]]
        begins = [shared[: r.randrange(5, 40)] if r.random() < 0.5 else [] for _ in range(self.requests - 1)]
        return long + [begin + [r.randrange(3, 500) for _ in range(r.randrange(1, 25))] for begin in begins]

    def settings(self, model: Any) -> dict[str, Any]:
        """Of the engine. Greedy, or sampled where one prompt has several answers; small pages and a small pool."""
        generation = GenerationConfig(
            max_new_tokens=self.new_tokens,
            do_sample=self.samples > 1,
            num_return_sequences=self.samples,
            eos_token_id=-1,
            pad_token_id=0,
        )
        engine = {"num_blocks": self.pages, "max_batch_tokens": self.batch_tokens, "seed": self.seed}
        if HAS_POOL:
            engine["page_size"] = PAGE
        else:
            # Up to 5.17 a block is one of a group's layers, not all; and an engine that is too tight gives up.
            mixed = len(set(model.config.layer_types or ())) > 1 if hasattr(model.config, "layer_types") else False
            engine |= {"block_size": PAGE, "num_blocks": 2 * self.pages * (LAYERS if mixed else 1)}
        if "auto_switch_to_flash" in SETTINGS:
            engine["auto_switch_to_flash"] = False
        config = ContinuousBatchingConfig(**engine, **self.options)
        return {"generation_config": generation, "continuous_batching_config": config}


def served(kind: str, device: str) -> Any:
    """A model of `batching` on ``device``, for continuous batching without FlashAttention."""
    model = copy.deepcopy(batching(kind)).to(device)
    # A release without this switch looks for FlashAttention unless it is told "paged".
    model.set_attn_implementation("sdpa" if "auto_switch_to_flash" in SETTINGS else "paged|sdpa")
    return model


def serve(model: Any, traffic: Traffic) -> dict[str, list[int]]:
    """Runs traffic through `generate_batch`; gives the tokens by request. Raises if a request failed."""
    torch.manual_seed(traffic.seed)
    outputs = model.generate_batch(traffic.prompts(), **traffic.settings(model))
    failed = {name: output.error for name, output in outputs.items() if output.error}
    # Up to 5.17 the answers of forked requests are computed, but not handed out.
    if failed or len(outputs) not in (traffic.requests, traffic.requests * traffic.samples):
        raise RuntimeError(f"{len(outputs)} outputs, failed: {failed}")
    return {name: output.generated_tokens for name, output in outputs.items()}


class FakeRequestState:
    """As much of a `RequestState` as the adapters read."""

    def __init__(self, request_id: str, prompt: Sequence[int], position_offset: int = 0) -> None:
        self.request_id = request_id
        self.initial_tokens = list(prompt)
        self.generated_tokens: list[int] = []
        self.position_offset = position_offset
        self._true_initial_tokens = 0


class AtStep:
    """Does ``act(canary, batch)`` before the check of forward ``step``, or of a later one: until it does not return
    False."""

    def __init__(self, step: int, act: Callable[[Any, Any], object]) -> None:
        self.step = step
        self.act = act
        self.done = False

    @hookimpl
    def canary_pre_forward(self, canary: Any, batch: Any) -> None:
        """Acts, once it is time."""
        if not self.done and canary.forwards >= self.step:
            self.done = self.act(canary, batch) is not False
