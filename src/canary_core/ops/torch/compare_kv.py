"""compare_kv: the KV of some slots against the same KV computed a second time, as sums of squares."""

from collections.abc import Sequence

import torch
from torch import Tensor

from canary_core.ops.sources import type_of
from canary_core.ops.state import RegionState
from canary_core.recomputer import Computed
from canary_core.region import KVSource

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Types of numbers that are compared."""

_SCALE_BYTES = 4

LANES = 64
"""Sums of one token that run side by side, and are then added in pairs: so that the order of additions is fixed."""


def compare_kv(state: RegionState, columns: Sequence[int], slots: Tensor, computed: Computed, out: Tensor) -> None:
    """Between forwards: source ``columns[i]`` of the region, at ``slots``, against source ``i`` of ``computed`` at its
    slots (integer ``[n]`` each). Fills ``out``, float32 ``[2, len(columns), n]``: the sum of squared differences, and
    of squares of what was computed; 0 where either side has no bytes. The relative L2 error is the root of their ratio.

    Of floats that are not finite on one side only the difference is infinite; what is not finite on both adds nothing.
    Sources need a `type_of` in `TYPES` and as many elements on both sides. fp8 is compared as stored: a scale of the
    whole source is the same on both sides, unless one of them was written under another than the other, which is a
    difference of that factor.
    """
    for i, (column, source) in enumerate(zip(columns, computed.sources, strict=True)):
        held, there = numbers(state.region.sources[column], slots.long())
        again, there_too = numbers(source, computed.slots.long())
        finite, finite_too = held.isfinite(), again.isfinite()
        both = finite & finite_too
        apart = torch.where(both, held - again, 0)
        apart = torch.where(finite != finite_too, torch.inf, apart)
        size = torch.where(both, again, 0)
        compared = there & there_too
        out[0, i] = torch.where(compared, _sum_of_squares(apart), 0)
        out[1, i] = torch.where(compared, _sum_of_squares(size), 0)


def elements(source: KVSource) -> int:
    """Numbers of a slot, 0 where these are of no type of `TYPES`."""
    dtype = type_of(source)
    if dtype not in TYPES or dtype is None:
        return 0
    return source.chunks * (source.chunk_bytes - _SCALE_BYTES * (source.scaled is not None)) // dtype.itemsize


def numbers(source: KVSource, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of each slot, float32 ``[n, elements]``, multiplied by the scale of their chunk where it has one; and
    whether the slot has any, bool ``[n]``."""
    dtype, storage = type_of(source), source.tensor.untyped_storage()
    if dtype not in TYPES or dtype is None:
        raise TypeError(f"{source.name}: numbers of {dtype} can't be compared")
    size, device = dtype.itemsize, source.tensor.device
    there = (slots >= 0) & source.has_bytes(slots)
    slot = torch.where(there, slots, 0)
    first = slot // source.page_size * source.page_stride_bytes + slot % source.page_size * source.slot_stride_bytes
    first += source.address - storage.data_ptr()
    chunk = torch.arange(source.chunks, device=device)[:, None] * source.chunk_stride_bytes
    scale_bytes = _SCALE_BYTES if source.scaled is not None else 0
    within = chunk + torch.arange((source.chunk_bytes - scale_bytes) // size, device=device) * size
    found = _at(storage, dtype, first[:, None] + within.flatten()).float()
    if scale_bytes:
        scales = _at(storage, torch.float32, first[:, None] + chunk.flatten() + source.chunk_bytes - scale_bytes)
        found = (found.view(len(slots), source.chunks, -1) * scales[:, :, None]).flatten(1)
    return found, there


def _at(storage: torch.UntypedStorage, dtype: torch.dtype, places: Tensor) -> Tensor:
    """Numbers at ``places``, in bytes from the begin of ``storage``."""
    memory = torch.empty(0, dtype=dtype, device=places.device)
    return memory.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))[places // dtype.itemsize]


def _sum_of_squares(numbers: Tensor) -> Tensor:
    """Of each row of ``numbers``, float32 ``[n, elements]``: every `LANES`-th number is added up in order, then
    neighbours are, until one sum is left."""
    elements = numbers.shape[1]
    padded = torch.nn.functional.pad(numbers, (0, -elements % LANES)).view(len(numbers), -1, LANES)
    total = padded.new_zeros(len(numbers), LANES)
    for i in range(padded.shape[1]):
        squares = padded[:, i] * padded[:, i]
        total = total + squares
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total[:, 0]
