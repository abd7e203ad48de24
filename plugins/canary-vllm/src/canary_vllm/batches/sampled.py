"""What vLLM's samplers gave for a forward, as `canary.sampled` wants it. The host waits for nothing: what it does not
know stays on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from canary_adapters import sampled_tokens

Given = tuple[Tensor, Sequence[int]]
"""Tokens ``[rows, n]``, and rows whose token is no one's: prompts that are not at their end."""


def of_v1(runner: Any, output: Any, drafts: Any) -> Given:
    """``output`` of `_sample`; ``drafts``: the metadata of what was drafted, None for nothing."""
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
