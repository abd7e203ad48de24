"""Where the bytes of a source's slots lie in a storage, and which slot a byte of a storage belongs to."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from canary_core.region import KVSource
from canary_core.watchers.audit.memory import Storage

INDEX_ENTRIES = 1 << 22
"""Most index entries at once: 32 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotBytes:
    """The bytes of ``source``'s slots in ``storage``, in the largest units allowed by all addresses."""

    source: KVSource
    storage: Storage

    @property
    def first(self) -> int:
        """Offset of slot 0 in the storage, in bytes."""
        return self.source.address - self.storage.start

    @property
    def unit(self) -> torch.dtype:
        """int64, int32 or uint8."""
        s = self.source
        step = gcd(
            self.first,
            s.page_stride_bytes,
            s.slot_stride_bytes,
            s.chunk_stride_bytes,
            s.chunk_bytes,
            self.storage.start,
        )
        return torch.int64 if step % 8 == 0 else torch.int32 if step % 4 == 0 else torch.uint8

    def units(self, data: Tensor) -> Tensor:
        """``data`` (uint8 ``[n]``, of the storage or a copy) as units; an incomplete last unit is left out."""
        size = self.unit.itemsize
        return data[: data.numel() // size * size].view(self.unit)

    def pieces(self, slots: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """``slots`` (int64 ``[n]``) in pieces: the slots with bytes, int64 ``[m]``, and the index of each of their
        units, int64 ``[m, units of a slot]``, on the device of ``slots``."""
        source, size = self.source, self.unit.itemsize
        slots = slots[source.has_bytes(slots)]
        chunk = torch.arange(source.chunks, device=slots.device) * (source.chunk_stride_bytes // size)
        inside = (chunk[:, None] + torch.arange(source.chunk_bytes // size, device=slots.device)).flatten()
        for piece in slots.split(max(INDEX_ENTRIES // len(inside), 1)):
            page, place = piece // source.page_size, piece % source.page_size
            first = self.first + page * source.page_stride_bytes + place * source.slot_stride_bytes
            yield piece, (first // size)[:, None] + inside

    def slots_at(self, offsets: Tensor, slots: int) -> Tensor:
        """Which of the source's ``slots`` slots each byte at ``offsets`` (int64 ``[n]``, of the storage) belongs to:
        int64 ``[n]``, -1 for none."""
        source = self.source
        counts = {
            "page": (source.page_stride_bytes, -(-slots // source.page_size)),
            "slot": (source.slot_stride_bytes, source.present_slots),
            "chunk": (source.chunk_stride_bytes, source.chunks),
        }
        rest, found = offsets - self.first, {}
        ours = rest >= 0
        # From the largest stride down: what is left after the last one must lie within a chunk.
        for name, (stride, count) in sorted(counts.items(), key=lambda item: -item[1][0]):
            number = torch.zeros_like(rest)
            if stride and count > 1:
                number = (rest // stride).clamp(0, count - 1)
            found[name], rest = number, rest - number * stride
        ours &= (rest >= 0) & (rest < source.chunk_bytes)
        slot = found["page"] * source.page_size + found["slot"]
        return torch.where(ours & (slot < slots), slot, -1)
