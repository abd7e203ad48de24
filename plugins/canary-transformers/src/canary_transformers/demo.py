"""``canary demo`` on Transformers: tiny random models, served by continuous batching."""

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from canary_core import PluginError
from canary_core.testing import NEW_TOKENS, PROMPT_TOKENS, TOKENS, Job, Served
from canary_transformers import version
from canary_transformers.guard import Guard

PAGE_TOKENS = 16
POOL_TOKENS = 1024
"""Few enough that requests wait for each other and cached blocks are evicted."""
BATCH_TOKENS = 80
WINDOW_TOKENS = 32
LIMIT_S = 120.0
"""After this time without an answer the engine counts as stuck."""


class TransformersDemo:
    """Llama with full attention everywhere, Gemma 3 with a sliding window on every second layer."""

    name = "transformers"
    models = ("llama", "gemma3")

    def serve(self, job: Job) -> Served:
        """All requests are queued before the engine starts, so that its batches do not depend on timing."""
        model = _model(job.model, job.seed)
        guard = Guard(model, version.require_fit(job.config))
        for plugin in job.plugins:
            guard.register(plugin)
        with guard, torch.no_grad(), _one_thread():
            outputs, seconds = _generate(model, job)
        return Served(outputs, guard.stats() if job.config.mode != "off" else {}, seconds)


def _generate(model: Any, job: Job) -> tuple[tuple[object, ...], float]:
    """Each request's tokens with their log probabilities, and the seconds it all took."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # It tells about missing extras and, where a fault makes NaNs, about those.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

    options: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(**options),  # type: ignore[no-untyped-call]  # Transformers has no types
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=POOL_TOKENS // PAGE_TOKENS,
            max_batch_tokens=BATCH_TOKENS,
            # While a long prompt is read in parts, all others wait: only so does a model with windows, whose blocks are
            # never cached for later requests, have content that a forward does not read.
            scheduler_type="prefill_first",
            auto_switch_to_flash=False,
            return_logprobs=True,
            use_async_batching=False,
        ),
    )
    for i, (prompt, new_tokens) in enumerate(zip(job.traffic.prompts, job.traffic.new_tokens, strict=True)):
        manager.add_request(list(prompt), request_id=f"request-{i}", max_new_tokens=new_tokens)
    started = time.perf_counter()
    manager.start()
    answers: dict[str, object] = {}
    try:
        while len(answers) < len(job.traffic.prompts):
            result = manager.get_result(timeout=LIMIT_S)
            if result is None:
                raise PluginError(
                    f"transformers answered {len(answers)} of {len(job.traffic.prompts)} requests, then hung"
                )
            if result.is_finished():
                answers[result.request_id] = (result.error, tuple(result.generated_tokens), tuple(result.logprobs))
                job.finished()
        seconds = time.perf_counter() - started
    finally:
        manager.stop(block=True, timeout=LIMIT_S)
        manager.destroy()
    return tuple(answers[f"request-{i}"] for i in range(len(job.traffic.prompts))), seconds


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=4)
def _model(name: str, seed: int) -> Any:
    """A tiny model with random weights, large enough that answers differ."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": TOKENS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2 * (PROMPT_TOKENS + NEW_TOKENS),
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
        config = transformers.Gemma3TextConfig(**sizes, sliding_window=WINDOW_TOKENS, layer_types=layers)
        model_class = transformers.Gemma3ForCausalLM
    model = model_class(config)
    model.eval().set_attn_implementation("sdpa")
    return model
