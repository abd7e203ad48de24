"""`Box`: where the bytes of sources and tensors lie, as runs at strides."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from canary_core.region import KVSource

Dim = tuple[int, int]
"""Stride in bytes, and count."""


@dataclass(frozen=True, slots=True)
class Box:
    """``length`` bytes at ``start`` plus ``i * stride`` for ``i`` below ``count`` of each of ``dims``."""

    start: int
    length: int
    dims: tuple[Dim, ...] = ()

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.start + sum(stride * (count - 1) for stride, count in self.dims) + self.length

    @property
    def runs(self) -> int:
        """Number of runs."""
        return prod(count for _, count in self.dims)

    @property
    def size(self) -> int:
        """Number of bytes, if no two runs overlap."""
        return min(self.runs * self.length, self.end - self.start)

    def merged(self) -> "Box":
        """The same bytes with as few dimensions as possible, largest stride first."""
        length = self.length
        dims: list[Dim] = []
        for stride, count in sorted(d for d in self.dims if d[1] > 1 and d[0]):
            if not dims and stride <= length:
                length += stride * (count - 1)
            elif dims and stride == dims[-1][0] * dims[-1][1]:
                dims[-1] = (dims[-1][0], dims[-1][1] * count)
            else:
                dims.append((stride, count))
        return Box(self.start, length, tuple(reversed(dims)))

    def starts(self) -> Tensor:
        """Starts of the runs: int64 ``[runs]``."""
        found = torch.tensor([self.start], device="cpu")
        for stride, count in self.dims:
            found = (found[:, None] + torch.arange(count, device="cpu") * stride).flatten()
        return found


def box_of(tensor: Tensor) -> Box:
    """The bytes of ``tensor``'s elements."""
    size = tensor.element_size()
    dims = tuple((stride * size, count) for stride, count in zip(tensor.stride(), tensor.shape, strict=True))
    return Box(tensor.data_ptr(), size, dims).merged()


def boxes_of(source: KVSource, slots: int) -> list[Box]:
    """The bytes of ``source``'s ``slots`` slots."""
    return [box.merged() for _, box in slot_boxes(source, slots, source.address)]


def slot_boxes(source: KVSource, slots: int, address: int) -> Iterator[tuple[int, Box]]:
    """First slot and bytes of all whole pages of ``source`` and of the last page, if it is cut short, as far as they
    have bytes. ``dims``: pages, slots of a page, chunks. ``address``: of the source's first byte."""
    pages, rest = divmod(slots, source.page_size)
    chunks = source.chunk_stride_bytes, source.chunks
    for first, count, held in ((0, pages, source.page_size), (pages, 1, rest)):
        present = min(held, source.present_slots)
        if count and present:
            dims = (source.page_stride_bytes, count), (source.slot_stride_bytes, present), chunks
            yield first * source.page_size, Box(address + first * source.page_stride_bytes, source.chunk_bytes, dims)
