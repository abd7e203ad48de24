"""Output of vLLM's samplers for a forward, in the form of `Canary.sampled`. The host waits for nothing: numbers unknown
to the host stay on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import sampled_tokens

Given = tuple[Tensor, Sequence[int]]
"""Tokens ``[rows, n]``, and rows without a sampled token: prompts in the middle."""


def of_v1(runner: Any, output: Any, drafts: Any) -> Given:
    """``output`` of `_sample`; ``drafts``: the metadata of drafted tokens, None without any."""
    tokens: Tensor = output.sampled_token_ids
    without = runner.discard_request_mask.np[: len(tokens)].nonzero()[0].tolist()
    return sampled_tokens(tokens, None if drafts is None else drafts.num_draft_tokens), without


def of_v2(output: Any, inputs: Any) -> Given:
    """``output`` of `sample`; ``inputs``: the batch."""
    tokens, rows = output.sampled_token_ids, int(inputs.num_reqs)
    computed = inputs.num_computed_prefill_tokens_np[:rows] + inputs.num_scheduled_tokens[:rows]
    unfinished = inputs.is_prefilling_np[:rows] & (computed < inputs.prefill_len_np[:rows])
    drafts = None
    if tokens.shape[1] > 1:
        tokens = tokens.where(torch.arange(tokens.shape[1], device=tokens.device) < output.num_sampled[:, None], -1)
        drafts = (inputs.cu_num_logits_np[1 : rows + 1] - inputs.cu_num_logits_np[:rows] - 1).tolist()
    return sampled_tokens(tokens, drafts), unfinished.nonzero()[0].tolist()
