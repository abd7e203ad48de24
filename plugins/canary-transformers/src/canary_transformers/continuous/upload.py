"""Small integers to the device, without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """``values`` as int64 ``[n]`` on ``device``. From pinned memory, so that the host does not wait for the stream."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def upload_lists(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each list as int64 tensor on ``device``, all in one copy."""
    everything = upload([value for values in lists for value in values], device)
    return list(everything.split([len(values) for values in lists]))
