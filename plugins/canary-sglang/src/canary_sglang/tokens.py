"""What a batch's requests themselves say that their tokens are: the oracle against foreign prefixes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

UNKNOWN = -1
TABLE_STEP = 16
"""Tables are as wide as a multiple of this, so that kernels needn't be compiled for others."""
MOST_TOKENS = 1 << 22
"""Most entries of one table; positions beyond what fits are not judged."""


def expected_tokens(
    requests: Sequence[Any | None], ends: Sequence[int], device: torch.device, begins: Sequence[int] | None = None
) -> Tensor | None:
    """Tokens of SGLang's `Req` objects by position up to ``ends``, int32 ``[requests, width]``; -1 where unknown, and
    before ``begins``. None if nothing is known. One copy to the device, which the host does not wait for."""
    if all(request is None for request in requests):
        return None
    width = -(-min(max(ends), MOST_TOKENS // len(requests)) // TABLE_STEP) * TABLE_STEP
    table = torch.full((len(requests), width), UNKNOWN, dtype=torch.int32, pin_memory=device.type == "cuda")
    for row, request, end in zip(table, requests, ends, strict=True):
        if request is None:
            continue
        prompt = request.origin_input_ids
        known = min(len(prompt), end, width)
        row[:known] = as_tensor(prompt)[:known]
        output = request.output_ids[: min(end, width) - known] if known == len(prompt) else ()
        if len(output):
            row[known : known + len(output)] = as_tensor(output)
    for row, begin in zip(table, begins or (), strict=begins is not None):
        row[:begin] = UNKNOWN
    return table.to(device, non_blocking=True)


def as_tensor(tokens: Any) -> Tensor:
    """Without a copy where SGLang keeps them as an array."""
    if getattr(tokens, "typecode", None) == "q":
        return torch.frombuffer(tokens, dtype=torch.int64) if len(tokens) else torch.empty(0, dtype=torch.int64)
    return torch.tensor(list(tokens), dtype=torch.int64)
