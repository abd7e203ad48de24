"""What a batch's requests themselves say that their tokens are: the oracle against foreign prefixes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    # A batch of cached prompts is idle until this is done; numpy's views cost a fifth of torch's.
    for row, request, end in zip(table.numpy(), requests, ends, strict=True):
        if request is None:
            continue
        prompt = request.origin_input_ids
        known = min(len(prompt), end, width)
        row[:known] = as_array(prompt)[:known]
        output = request.output_ids[: min(end, width) - known] if known == len(prompt) else ()
        if len(output):
            row[known : known + len(output)] = as_array(output)
    for row, begin in zip(table.numpy(), begins or (), strict=begins is not None):
        row[:begin] = UNKNOWN
    return table.to(device, non_blocking=True)


def as_array(tokens: Any) -> NDArray[np.int64]:
    """Without a copy where SGLang keeps them as an array."""
    if getattr(tokens, "typecode", None) == "q" and len(tokens):
        return np.frombuffer(tokens, dtype=np.int64)
    return np.array(tokens, dtype=np.int64)
