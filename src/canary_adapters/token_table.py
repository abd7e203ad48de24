"""The requests' own tokens as `BatchView.expected_tokens`."""

from collections.abc import Sequence

import torch
from torch import Tensor

UNKNOWN = -1
TABLE_STEP = 16
"""The width of a table of tokens is a multiple of this, so that fewer kernels are compiled."""
MOST_TOKENS = 1 << 22
"""Most entries of one table; positions that do not fit are not checked."""


def token_table(requests: Sequence[Tensor | None], longest: int, device: torch.device) -> Tensor:
    """Tokens by position, int32 ``[rows, width]`` on ``device``, as far as ``longest`` at least; -1 where they are not
    known. ``requests``: the tokens of each row from position 0 on, int64 ``[n]`` on the host, None where none are
    known. The host does not wait."""
    width = -(-min(longest, MOST_TOKENS // len(requests)) // TABLE_STEP) * TABLE_STEP
    table = torch.full((len(requests), width), UNKNOWN, dtype=torch.int32, pin_memory=device.type == "cuda")
    for row, tokens in zip(table.numpy(), requests, strict=True):
        if tokens is not None:
            known = min(len(tokens), width)
            row[:known] = tokens.numpy()[:known]
    return table.to(device, non_blocking=True)
