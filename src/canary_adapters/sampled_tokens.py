"""Sampled tokens in the order of `Canary.sampled`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from canary_core.ops.upload import upload
from canary_core.records import NOT_SAMPLED


def sampled_tokens(tokens: Tensor, drafts: Sequence[int] | None) -> Tensor:
    """``tokens`` ``[rows, n]``, shifted from the left to the right: a row has the token after its first draft in the
    first column, and gets the token after its last one into the last column. Columns before its first one leave what is
    known of earlier positions. ``drafts``: number of each row's, None if all columns are taken."""
    columns = tokens.shape[1]
    if drafts is None or all(count + 1 == columns for count in drafts):
        return tokens
    column = torch.arange(columns, device=tokens.device) + (upload(drafts, tokens.device)[:, None] + 1 - columns)
    return tokens.gather(1, column.clamp(min=0)).where(column >= 0, NOT_SAMPLED)
