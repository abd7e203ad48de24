"""The tokens of a batch as given by its requests. The check compares them with the tokens of cached slots, and so finds
the prefix of another request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from canary_adapters import FIRST_CONTENT, unknown_tokens, upload
from canary_sglang.compat.schedulers import has_media, overrides

if TYPE_CHECKING:
    from canary_core import Contents


def expected_tokens(
    requests: Sequence[Any | None],
    ends: Sequence[int],
    device: torch.device,
    begins: Sequence[int] | None = None,
    contents: "Contents | None" = None,
) -> Tensor | None:
    """Tokens of SGLang's `Req` objects by position, int32 ``[requests, width]``: from position ``begins`` (default 0)
    up to ``ends``, -1 elsewhere and where they are unknown. ``contents``: content in the place of tokens. None if no
    request is known. Costs one copy to the device; the host does not wait for it."""
    if all(request is None for request in requests):
        return None
    table = unknown_tokens(len(requests), max(ends), device)
    width = table.shape[1]
    # With cached prompts the device waits for this code.
    for row, request, end in zip(table.numpy(), requests, ends, strict=True):
        if request is None:
            continue
        prompt = request.origin_input_ids
        known = min(len(prompt), end, width)
        given = as_array(prompt)[:known]
        row[:known] = folded(given) if has_media(request) else given
        output = request.output_ids[: min(end, width) - known] if known == len(prompt) else ()
        if len(output):
            row[known : known + len(output)] = as_array(output)
        if contents is not None and overrides(request) is not None:
            row[:] = contents.over(request.rid, torch.from_numpy(row)).numpy()
    for row, begin in zip(table.numpy(), begins or (), strict=begins is not None):
        row[:begin] = -1
    return table.to(device, non_blocking=True)


WIDEST = (1 << 31) - 1
"""Largest number that a record has room for."""


def folded(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """``tokens`` with numbers of content, of 31 bits, in the place of wider ones: from 0.5.23 on SGLang's numbers for
    media have 62 bits."""
    wide = tokens > WIDEST
    return np.where(wide, FIRST_CONTENT | tokens & (FIRST_CONTENT - 1), tokens) if wide.any() else tokens


def folded_tensor(tokens: Tensor) -> Tensor:
    """As `folded`, on any device and without a look at it: always a copy."""
    return torch.where(tokens > WIDEST, tokens & (FIRST_CONTENT - 1) | FIRST_CONTENT, tokens)


def as_array(tokens: Any) -> NDArray[np.int64]:
    """Tokens as an array, without a copy where SGLang has them as an ``array.array`` of int64; some have a list."""
    if getattr(tokens, "typecode", None) == "q" and len(tokens):
        return np.frombuffer(tokens, dtype=np.int64)
    if isinstance(tokens, list):
        # A third of what numpy takes.
        return upload(tokens, torch.device("cpu")).numpy()
    return np.array(tokens, dtype=np.int64)
