"""`WeightTable`: what is kept of a model's parameters: a fingerprint for each chunk, and where the chunks are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from canary_core.ops.fingerprint_keys import FingerprintKeys
from canary_core.ops.launches import Launch

CHUNK_BYTES = 64 << 10
"""Bytes with one fingerprint, at most: 8 bytes of fingerprint and 4 of its range are 0.018 % of them."""

PARTS, LEAST_CHUNK_BYTES = 16, 256
"""A smaller range has as many chunks, if they have as many bytes: so that a stray write, which changes few of them, is
no update, which changes all."""

ALIGNMENT = 16
"""Chunks are multiples of so many bytes."""

ROOM = 128
"""Differing chunks whose rows are kept until the host has read them."""


class RangeWord(IntEnum):
    """int64 words of a range, in `WeightTable.places`."""

    ADDRESS = 0
    BYTES = 1
    FIRST = 2
    """Number of the first chunk."""
    CHUNK_BYTES = 3


class Different(IntEnum):
    """int64 words of a row of `WeightTable.found`, behind the first row, which has the number of differences."""

    CHUNK = 0
    FINGERPRINT = 1
    """The chunk's present one."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightRange:
    """Bytes that stay as they are: ``size_bytes`` from ``address`` on. ``read``: the same bytes as a uint8 tensor, for
    the reference and the host; only while they are there."""

    address: int
    size_bytes: int
    read: Callable[[], Tensor]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of each chunk but the last."""
        part = -(-self.size_bytes // (PARTS * ALIGNMENT)) * ALIGNMENT
        return min(max(part, LEAST_CHUNK_BYTES), CHUNK_BYTES)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.size_bytes // self.chunk_bytes)


class WeightTable:
    """Device memory for ``ranges``, on one device. Tensors keep their addresses for life.

    places: int64 ``[ranges, 4]``, see `RangeWord`. owners: int32 ``[chunks]``, the range of each chunk.
    fingerprints: int64 ``[chunks]``, 0 for unknown: the next comparison takes it. found: int64 ``[1 + ROOM, 2]``,
    see `Different`. keys: int64, those of a chunk's words, and behind them the salt, see `hashing`: all of
    ``fingerprint_keys``. launches: the back ends' cache.
    """

    def __init__(self, ranges: Sequence[WeightRange], device: torch.device, keys: FingerprintKeys) -> None:
        self.ranges = tuple(ranges)
        self.firsts: list[int] = []
        """Number of each range's first chunk."""
        self.chunks = 0
        for one in ranges:
            self.firsts.append(self.chunks)
            self.chunks += one.chunks
        rows = [[r.address, r.size_bytes, first, r.chunk_bytes] for r, first in zip(ranges, self.firsts, strict=True)]
        self.places = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, len(RangeWord)).to(device)
        counts = torch.tensor([r.chunks for r in ranges], dtype=torch.int64, device="cpu")
        owners = torch.arange(len(ranges), dtype=torch.int32, device="cpu").repeat_interleave(counts)
        self.owners = owners.to(device)
        self.fingerprints = torch.zeros(self.chunks, dtype=torch.int64, device=device)
        self.found = torch.zeros(1 + ROOM, len(Different), dtype=torch.int64, device=device)
        self.fingerprint_keys = keys
        self.keys = torch.cat((keys.words(CHUNK_BYTES // 4), keys.sources(1))).to(device)
        self.launches: dict[str, Launch] = {}

    @property
    def memory_bytes(self) -> int:
        """Canary's device memory for the table, in bytes."""
        return sum(t.nbytes for t in (self.places, self.owners, self.fingerprints, self.found, self.keys))

    @property
    def guarded_bytes(self) -> int:
        """Bytes of all ranges."""
        return sum(one.size_bytes for one in self.ranges)

    def begin(self) -> None:
        """On the current stream, before a comparison: no difference is noted."""
        self.found[0].zero_()

    def forget(self, number: int) -> None:
        """On the current stream: the content of the ``number``-th range is taken anew by the next comparisons."""
        first = self.firsts[number]
        self.fingerprints[first : first + self.ranges[number].chunks].zero_()

    def leave_out(self, number: int) -> None:
        """On the current stream: the ``number``-th range is not read from now on."""
        # Not an assignment: that copies the number from the host and waits for the device.
        self.places[number, RangeWord.BYTES].fill_(0)
        self.forget(number)
