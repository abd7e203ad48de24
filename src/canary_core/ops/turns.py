"""`Turns`: sources that repeat, and move together at a fraction of the cost (`SourceTable.rebind_alike`)."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from canary_core.records import DESCRIPTOR_WORDS, Descriptor
from canary_core.region import KVSource, Placement

MOVING = (
    Descriptor.ADDRESS,
    Descriptor.PAGE_STRIDE,
    Descriptor.SLOT_STRIDE,
    Descriptor.CHUNK_STRIDE,
    Descriptor.PRESENT,
)
"""Words of a descriptor that change when a source's bytes move."""

BEST_ALIGNMENT = 16
"""See `KVSource.alignment`."""


class Turns(NamedTuple):
    """Sources that repeat after every ``turns``. ``sources``: all, without tensors; ``first``: the first turn,
    ``types``: type and device of each tensor. ``repeat``: whether the sources do repeat, with the best alignment.
    ``addresses`` and ``rows_but_addresses``: the changing words of descriptors on the host, ``[sources]`` and
    ``[sources / turns, turns, words]``."""

    sources: tuple[KVSource, ...]
    turns: int
    first: tuple[KVSource, ...]
    types: list[tuple[torch.dtype, int]]
    repeat: bool
    addresses: Tensor
    rows_but_addresses: Tensor

    @classmethod
    def of(cls, sources: Sequence[KVSource], count: int, rows: Tensor) -> "Turns":
        """The turns of ``sources`` with descriptors ``rows``."""
        kept = [[word for place, word in enumerate(row) if place not in MOVING] for row in rows.tolist()]
        repeat = all(words == kept[i % count] for i, words in enumerate(kept)) and all(
            source.alignment == BEST_ALIGNMENT and not source.offset_bytes for source in sources
        )
        # Tensors that a cache has given up must not be kept.
        nowhere = torch.empty(0)
        bare = tuple(replace(source, tensor=nowhere) for source in sources)
        types = [(source.tensor.dtype, source.tensor.get_device()) for source in sources[:count]]
        changing = rows.view(-1, count, DESCRIPTOR_WORDS)[:, :, Descriptor.PAGE_SIZE : Descriptor.PRESENT + 1]
        return cls(bare, count, bare[:count], types, repeat, rows[:, Descriptor.ADDRESS], changing)

    def fit(self, tensors: Sequence[Tensor], addresses: Sequence[int], places: Sequence[Placement], slots: int) -> bool:
        """Whether all sources may be where ``tensors`` and ``places`` say: with the same kernels, and with all of
        ``slots`` slots within the tensors."""
        if not self.repeat:
            return False
        for turn, (source, place) in enumerate(zip(self.first, places, strict=True)):
            mine = tensors[turn :: self.turns]
            if not _same_layout(mine, *self.types[turn]) or not _within(mine[0], source, place, slots):
                return False
        return not bits(addresses, places) % BEST_ALIGNMENT

    def words(self, places: Sequence[Placement]) -> "array[int]":
        """The words from `Descriptor.PAGE_SIZE` to `Descriptor.PRESENT` of one turn, source after source."""
        words = array("q")
        for source, place in zip(self.first, places, strict=True):
            words.extend((
                source.page_size, place.page_stride_bytes, place.slot_stride_bytes, source.chunks,
                place.chunk_stride_bytes, source.chunk_bytes, place.present,
            ))  # fmt: skip
        return words

    def moved(self, tensors: Sequence[Tensor], places: Sequence[Placement]) -> tuple[KVSource, ...]:
        """The sources at the new place."""
        turns = [places[i % self.turns] for i in range(len(tensors))]
        return tuple(
            replace(source, tensor=tensor, **place._asdict())
            for source, tensor, place in zip(self.sources, tensors, turns, strict=True)
        )


def bits(addresses: Sequence[int], places: Sequence[Placement]) -> int:
    """Bitwise or of everything that decides the alignment."""
    strides = [n for p in places for n in (p.page_stride_bytes, p.slot_stride_bytes, p.chunk_stride_bytes)]
    return reduce(or_, addresses, reduce(or_, strides, 0))


def _same_layout(tensors: Sequence[Tensor], dtype: torch.dtype, device: int) -> bool:
    """Whether all tensors have the shape and strides of the first, and the given type and device."""
    shape, strides = tensors[0].shape, tensors[0].stride()
    for tensor in tensors:
        if tensor.shape != shape or tensor.stride() != strides:
            return False
        if tensor.dtype != dtype or tensor.get_device() != device:
            return False
    return True


def _within(tensor: Tensor, source: KVSource, place: Placement, slots: int) -> bool:
    """Whether all slots of ``source`` with bytes lie within ``tensor`` itself, and so within its storage."""
    page, slot, chunk, present = place
    if min(page, slot, chunk) < 0 or not 0 < present <= source.page_size:
        return False
    pages = -(-slots // source.page_size)
    reach = (pages - 1) * page + (present - 1) * slot + (source.chunks - 1) * chunk + source.chunk_bytes
    last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    return reach <= (last + 1) * tensor.element_size()
