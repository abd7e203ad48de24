"""Entries as bytes, for another engine that gets KV from this one. int64, little endian:

| word      | content                                                                              |
|-----------|--------------------------------------------------------------------------------------|
| 0         | `MAGIC`                                                                              |
| 1         | digest of the region's sources: names, order, bytes; `FingerprintKeys.id`, times 2³² |
| 2         | slots of a block                                                                     |
| 3         | rank of the process: entries of one shard mean nothing to another                    |
| 4         | number of entries                                                                    |
| 5         | number of sources                                                                    |
| 6 and on  | entries: prefix hash, sum, 1 if the prefix has no lost entry, a value a source       |
"""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from canary_core.errors import AttachError

MAGIC = 0x3152474C59524E43
"""``CNRYLGR1``"""
HEADER_WORDS = 6
HASH, SUM, COMPLETE, VALUES = 0, 1, 2, 3
"""First word of each part of an entry."""


@dataclass(frozen=True, slots=True)
class Format:
    """Facts that two ledgers must have in common for a comparison of entries."""

    digest: int
    page_slots: int
    rank: int
    sources: int
    keys: int = 0

    def pack(self, entries: Tensor) -> bytes:
        """``entries``: int64 ``[n, VALUES + sources]``, on the host."""
        digest = self.keys << 32 | self.digest
        header = torch.tensor([MAGIC, digest, self.page_slots, self.rank, len(entries), self.sources], device="cpu")
        table = torch.cat((header, entries.flatten()))
        return ctypes.string_at(table.data_ptr(), table.nbytes)

    def unpack(self, data: bytes | bytearray | memoryview) -> tuple[Tensor, bool]:
        """The entries packed by another ledger, and whether their values have the same keys; if not, they mean nothing.
        Raises `AttachError` where the formats do not fit."""
        size = len(data)
        if size % 8 or size < HEADER_WORDS * 8:
            raise AttachError(f"ledger entries of {size} bytes are cut short; give what export gave")
        table = torch.frombuffer(bytearray(data), dtype=torch.int64)
        magic, digest, page_slots, rank, count, sources = table[:HEADER_WORDS].tolist()
        if magic != MAGIC:
            raise AttachError("these are no ledger entries; give what export gave")
        got = Format(digest & 0xFFFFFFFF, page_slots, rank, sources, digest >> 32)
        if replace(got, keys=self.keys) != self:
            raise AttachError(
                f"ledger entries of another layout: wanted {self}, got {got}; both engines need the same model, cache "
                "dtype, block size, CANARY_BYTES and split over ranks"
            )
        entries = table[HEADER_WORDS:]
        if len(entries) != count * (VALUES + sources):
            raise AttachError(f"ledger entries are cut short: {count} are announced; give what export gave")
        return entries.view(count, VALUES + sources), got.keys == self.keys
