"""Small tensors of the host to the device, without waiting for it."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

_TYPECODES = {torch.int64: "q", torch.int32: "i"}


def upload(values: Sequence[int] | Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """``values`` as a tensor on ``device``: numbers as ``[n]`` of ``dtype``, a tensor of the host as it is. One copy on
    the current stream, from pinned memory, so that the host does not wait."""
    host = values if isinstance(values, Tensor) else _host(values, dtype)
    return pinned(host, device).to(device, non_blocking=True)


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """A copy of ``host`` in memory from which a copy to ``device`` makes nobody wait; itself where ``device`` is the
    CPU."""
    return host.pin_memory() if device.type == "cuda" else host


def _host(values: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype not in _TYPECODES or not len(values):
        return torch.tensor(values, dtype=dtype, device="cpu")
    # Some hundred numbers at a seventh of what `torch.tensor` takes to look at each.
    return torch.frombuffer(array(_TYPECODES[dtype], values), dtype=dtype)
