"""`Doubt`: the prefixes of which the ledger has lost something. A set that never forgets, in bounded memory."""

from collections.abc import Iterable

PROBES = 4
_MASK = (1 << 64) - 1


class Doubt:
    """A Bloom filter over 64-bit hashes, with ``size_bytes`` rounded up to a power of 2; memory is taken with the first
    entry. It may say of a hash that it is in doubt when it isn't, ever more often as it fills: then a comparison counts
    as unknown, and nothing worse happens. It never errs the other way.

    added: how many entries were made. everything: whether all is in doubt.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size = 1 << max(size_bytes - 1, 1).bit_length()
        self._bits = bytearray()
        self.added = 0
        self.everything = False

    def add(self, hash: int) -> None:
        """``hash``: signed or unsigned, 64 bits, as random as a prefix hash is."""
        if not self._bits:
            self._bits = bytearray(self._size)
        self.added += 1
        for bit in self._places(hash):
            self._bits[bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, hash: int) -> bool:
        if self.everything or not self._bits:
            return self.everything
        return all(self._bits[bit >> 3] >> (bit & 7) & 1 for bit in self._places(hash))

    def _places(self, hash: int) -> Iterable[int]:
        hash &= _MASK
        step = hash >> 32 | 1
        return ((hash + i * step) % (self._size * 8) for i in range(PROBES))
