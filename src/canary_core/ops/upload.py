"""Small tensors of the host to the device, without waiting for it."""

import struct
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

_TYPECODES = {torch.int64: "q", torch.int32: "i"}


FEW = 64
"""Numbers from which on `struct` is faster, which reads a format first."""


def upload(values: Sequence[int] | Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """``values`` as a tensor on ``device``: numbers as ``[n]`` of ``dtype``, a tensor of the host as it is. One copy on
    the current stream, from pinned memory, or for one number a fill: the host does not wait."""
    cpu = device.type == "cpu"
    if not cpu and len(values) == 1 and not isinstance(values, Tensor):
        # In the place of pinned memory and two copies.
        return torch.full((1,), values[0], dtype=dtype, device=device)
    host = values if isinstance(values, Tensor) else _host(values, dtype)
    return host if cpu else pinned(host, device).to(device, non_blocking=True)


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """A copy of ``host`` in memory from which a copy to ``device`` makes nobody wait; itself where ``device`` is the
    CPU."""
    return host.pin_memory() if device.type == "cuda" else host


def _host(values: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype not in _TYPECODES or not len(values):
        return torch.tensor(values, dtype=dtype, device="cpu")
    return torch.frombuffer(number_array(values, _TYPECODES[dtype]), dtype=dtype)


def number_array(values: Sequence[int], code: str) -> "array[int]":
    """``values`` as an array of its own with the type ``code``; a list of many in half of the time of `array`."""
    if len(values) < FEW or isinstance(values, array):
        return array(code, values)
    return array(code, struct.pack(f"{len(values)}{code}", *values))
