"""Small integers to the device, without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """``values`` as a tensor ``[n]`` on ``device``. From pinned memory, so that the host does not wait."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
