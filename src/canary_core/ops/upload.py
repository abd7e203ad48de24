"""Small tensors of the host to the device, without waiting for it."""

import struct
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
    return torch.frombuffer(number_array(values, _TYPECODES[dtype]), dtype=dtype)


def number_array(values: Sequence[int], code: str) -> "array[int]":
    """``values`` as an array of its own with the type ``code``; a list of many in half of the time of `array`."""
    if isinstance(values, array):
        return array(code, values)
    return array(code, struct.pack(f"{len(values)}{code}", *values))
