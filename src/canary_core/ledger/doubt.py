"""`Doubt`: the prefixes of which the ledger has lost something. A set that never forgets, in bounded memory."""

from collections.abc import Iterable

import torch

PROBES = 4


class Doubt:
    """A Bloom filter over 64-bit hashes, with one flag for each of ``size_bytes`` bytes, rounded up to a power of 2;
    memory is taken as it fills. It may say of a hash that it is in doubt when it isn't, ever more often as it fills:
    then a comparison counts as unknown, and nothing worse happens. It never errs the other way.

    added: how many entries were made. everything: whether all is in doubt.
    """

    def __init__(self, size_bytes: int) -> None:
        self._mask = min(1 << max(size_bytes - 1, 1).bit_length(), 1 << 32) - 1
        self._flags: torch.Tensor | None = None
        self.added = 0
        self.everything = False

    def add(self, hashes: Iterable[int]) -> None:
        """``hashes``: signed, 64 bits, as random as prefix hashes are."""
        every = torch.tensor([*hashes], dtype=torch.int64, device="cpu")
        if not len(every):
            return
        if self._flags is None:
            # Else it could be written to only in inference mode, if that is where the first entry is made.
            with torch.inference_mode(False):
                self._flags = torch.zeros(self._mask + 1, dtype=torch.bool, device="cpu")
        self.added += len(every)
        probe = torch.arange(PROBES, device="cpu")[:, None]
        # Only the low bits count, in which a signed shift is the same as an unsigned one.
        self._flags[(every + probe * (every >> 32 | 1)).bitwise_and_(self._mask).flatten()] = True

    def __contains__(self, hash: int) -> bool:
        if self.everything or self._flags is None:
            return self.everything
        step = hash >> 32 | 1
        flags = self._flags
        return all(bool(flags[(hash + probe * step) & self._mask]) for probe in range(PROBES))
