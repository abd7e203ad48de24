"""`Doubt`: prefixes with a lost entry in the ledger. A set that never forgets, in bounded memory."""

from collections.abc import Iterable

import torch
from torch import Tensor

from canary_core.ops.hashing import splitmix

PROBES = 4
"""Bits of an entry, of `_LINE_BITS` each chosen by 9 bits of a hash."""

LINE_BYTES = 64
"""All bits of an entry are in one cache line, so that a look-up takes one access to memory."""

SAMPLE = 4096
"""Fresh hashes looked up by `Doubt.ratio`."""

_LINE_BITS = 8 * LINE_BYTES
_BIT_SHIFTS = torch.arange(PROBES, device="cpu") * 9
_BIT = (1 << torch.arange(8, device="cpu")).to(torch.uint8)


class Doubt:
    """A Bloom filter over 64-bit hashes, of ``size_bytes`` bytes in whole lines, one at least; memory is taken as the
    filter fills. A hash sets `PROBES` bits in one line (Putze, Sanders & Singler, "Cache-, hash- and space-efficient
    Bloom filters", 2007). A hash may be in doubt without having been added, ever more often as the filter fills: then a
    comparison counts as unknown, and nothing worse happens. Never errs the other way.

    added: number of entries made. everything: whether all hashes are in doubt.
    """

    def __init__(self, size_bytes: int) -> None:
        self._lines = max(size_bytes // LINE_BYTES, 1)
        self._bytes: Tensor | None = None
        self._sampled = 0, 0.0
        self.added = 0
        self.everything = False

    @property
    def size_bytes(self) -> int:
        """Host memory taken, in bytes."""
        return 0 if self._bytes is None else len(self._bytes)

    def add(self, hashes: Iterable[int]) -> None:
        """``hashes``: signed, 64 bits, as random as prefix hashes are."""
        every = torch.tensor([*hashes], dtype=torch.int64, device="cpu")
        if not len(every):
            return
        if self._bytes is None:
            # Else it could be written to only in inference mode, if that is where the first entry is made.
            with torch.inference_mode(False):
                self._bytes = torch.zeros(self._lines * LINE_BYTES, dtype=torch.uint8, device="cpu")
        self.added += len(every)
        places = self._places(every).flatten()
        while len(places):
            index, bit = places >> 3, _BIT[places & 7]
            self._bytes[index] |= bit
            # Of several new bits of one byte one is set at a time.
            places = places[self._bytes[index] & bit == 0]

    def has(self, hashes: Tensor) -> Tensor:
        """Whether each of ``hashes``, int64 ``[n]``, is in doubt: bool ``[n]``."""
        if self.everything or self._bytes is None:
            return torch.full((len(hashes),), self.everything, device="cpu")
        places = self._places(hashes)
        found: Tensor = (self._bytes[places >> 3] & _BIT[places & 7] != 0).all(1)
        return found

    def ratio(self) -> float:
        """The share of never-added hashes in doubt, by a sample."""
        if self.everything or self._bytes is None:
            return float(self.everything)
        added, share = self._sampled
        if self.added > added * 1.01:
            fresh = splitmix(torch.arange(SAMPLE, device="cpu") - (self.added << 20))
            share = float(self.has(fresh).float().mean())
            self._sampled = self.added, share
        return share

    def __contains__(self, hash: int) -> bool:
        return bool(self.has(torch.tensor([hash], dtype=torch.int64, device="cpu"))[0])

    def _places(self, hashes: Tensor) -> Tensor:
        """Numbers of bits, int64 ``[n, PROBES]``."""
        mixed = splitmix(hashes)
        lines = ((mixed >> 36 & 0xFFFFFFF) * self._lines) >> 28
        return (lines * _LINE_BITS)[:, None] + (mixed[:, None] >> _BIT_SHIFTS & (_LINE_BITS - 1))
