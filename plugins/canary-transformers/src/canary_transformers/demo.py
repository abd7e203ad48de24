"""``canary demo`` on Transformers: tiny random models, served by continuous batching."""

import logging
import time
from typing import Any

import torch

from canary_core import PluginError
from canary_core.testing import NEW_TOKENS, PROMPT_TOKENS, TOKENS, Job, Served, one_thread
from canary_transformers import version
from canary_transformers.guard import Guard

PAGE_TOKENS = 16
POOL_TOKENS = 1024
"""Few enough that requests wait for each other and cached blocks are evicted."""
BATCH_TOKENS = 80
WINDOW_TOKENS = 32
LIMIT_S = 120.0
"""Longest time without an answer before the engine counts as stuck."""


class TransformersDemo:
    """Llama with full attention everywhere, Gemma 3 with a sliding window on every second layer."""

    name = "transformers"
    models = ("llama", "gemma3")

    def serve(self, job: Job) -> Served:
        """All requests are queued before the engine starts, so that its batches do not depend on timing."""
        from canary_transformers.tiny_models import Sizes, tiny_model

        model = tiny_model(job.model, job.seed, Sizes(TOKENS, 2 * (PROMPT_TOKENS + NEW_TOKENS), WINDOW_TOKENS))
        guard = Guard(model, version.require_fit(job.config))
        for plugin in job.plugins:
            guard.register(plugin)
        with guard, torch.no_grad(), one_thread():
            outputs, seconds = _generate(model, job)
        return Served(outputs, guard.stats() if job.config.mode != "off" else {}, seconds)


def _generate(model: Any, job: Job) -> tuple[tuple[object, ...], float]:
    """Each request's tokens with log probabilities, and the seconds in all."""
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
