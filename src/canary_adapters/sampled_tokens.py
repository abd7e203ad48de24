"""Sampled tokens in the order in which `Canary.sampled` takes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from canary_core.ops.upload import upload


def sampled_tokens(tokens: Tensor, drafts: Sequence[int] | None) -> Tensor:
    """``tokens`` ``[rows, n]``, of which a row has what follows its first draft in the first column, with what follows
    its last one in the last column. ``drafts``: how many each row has, None where all columns are taken."""
    columns = tokens.shape[1]
    if drafts is None or all(count + 1 == columns for count in drafts):
        return tokens
    column = torch.arange(columns, device=tokens.device) + (upload(drafts, tokens.device)[:, None] + 1 - columns)
    return tokens.gather(1, column.clamp(min=0)).where(column >= 0, -1)
