"""The requests' own tokens as `BatchView.expected_tokens`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from canary_core.batch import EXPECTED_STEP, MOST_EXPECTED

UNKNOWN = -1
TABLE_STEP = EXPECTED_STEP
"""The width of a table of tokens is a multiple of this."""
MOST_TOKENS = MOST_EXPECTED
"""Most entries of one table; positions that do not fit are not compared, and the forward counts as
``tokens_beyond_bound``."""


def token_table(requests: Sequence[Tensor | None], longest: int, device: torch.device) -> Tensor:
    """Tokens by position, int32 ``[rows, width]`` on ``device``, as far as ``longest`` at least; -1 where they are not
    known. ``requests``: the tokens of each row from position 0 on, int64 ``[n]`` on the host, None where none are
    known. The host does not wait."""
    table = unknown_tokens(len(requests), longest, device)
    for row, tokens in zip(table.numpy(), requests, strict=True):
        if tokens is not None:
            known = min(len(tokens), len(row))
            row[:known] = tokens.numpy()[:known]
    return table.to(device, non_blocking=True)


def unknown_tokens(rows: int, longest: int, device: torch.device) -> Tensor:
    """The table of `token_table` as long as nothing is known: -1, int32 ``[rows, width]``, on the host, in memory from
    which a copy to ``device`` makes nobody wait. For adapters that have no tensors of tokens: fill its rows by position
    through `Tensor.numpy`, whose views cost a fifth of torch's, and copy it with ``to(device, non_blocking=True)``."""
    width = -(-min(longest, MOST_TOKENS // rows) // TABLE_STEP) * TABLE_STEP
    return torch.full((rows, width), UNKNOWN, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
