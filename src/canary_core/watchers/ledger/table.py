"""`Table`: the entries of one region, by prefix hash, in bounded memory on the host."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from canary_core.ops import hashing
from canary_core.watchers.ledger.doubt import Doubt

ENTRY_BYTES = 230
"""Host memory of an entry beside its hash, sum and values: the cost of a Python dict."""

MOST_VARIANTS = 8
"""Most different bytes kept for one prefix; more leave the prefix in doubt."""

ROW_BYTES = 36
"""Memory of an entry's hash, sum, writer with position, forward, and place among the contents, beside its values; see
`Table.holders`."""

NEVER = (1 << 31) - 1
"""In the place of the number of a forward, where no forward of this engine is known to be the last one before."""

NOBODY = -(1 << 63)
"""In the place of an entry's writer and position: the bytes came from elsewhere, and prove nothing of others."""

MOST_LISTED = 1 << 16
"""Most entries listed by content at a time."""

_NONE, _SEVERAL = -1, -2
"""In the place of a row: no entry, or entries of different tokens with the same content, for good."""

DOUBT_SHARE = 8
"""`Doubt` takes one part in so many of the table's memory, 8 bits an entry after the table was overwritten a hundred
times."""


@dataclass(frozen=True, slots=True)
class Match:
    """Result of a look-up of one block. ``entries``: number of different bytes stored under the hash. ``equal``: one
    entry equals the block; ``condemned``: the equal entry was found wrong before. ``nearest``: without an equal one,
    the index of the entry with the fewest differing sources."""

    entries: int
    equal: bool = False
    condemned: bool = False
    nearest: int = -1


class Holder(NamedTuple):
    """An entry with a certain content: prefix hash, its growth in the block, the writer and position of the block's
    first slot (`BLOCK_WHO`), and `Table.forwards` when it was added, `NEVER` for one of another engine's."""

    hash: int
    sum: int
    who: int
    forwards: int


class Table:
    """Entries: a prefix hash, its growth in the block, a value for each of ``sources`` sources, and whose the block is.
    A hash may have several: bytes computed more than once, with other numerics.

    Rows are used in turn. A used entry moves to the front, so an overwritten one is among the least recently used half.
    With one entry of a hash all go, and the hash is in `doubt` from then on: somebody may still have the stored bytes.

    ``forwards``: how many have begun so far, kept with what is added.
    """

    def __init__(self, sources: int, size_bytes: int) -> None:
        self.entry_bytes = 8 * sources + ROW_BYTES + ENTRY_BYTES
        doubt_bytes = size_bytes // DOUBT_SHARE
        self.capacity = max((size_bytes - doubt_bytes) // self.entry_bytes, 1)
        # Engines run us in inference mode, and what is made there can be written to only there.
        with torch.inference_mode(False):
            # Memory of which nothing was written yet is not taken.
            self._values = torch.empty(self.capacity, sources, dtype=torch.int64, device="cpu")
            self._hashes = torch.empty(self.capacity, dtype=torch.int64, device="cpu")
            self._sums = torch.empty(self.capacity, dtype=torch.int64, device="cpu")
            self._who = torch.empty(self.capacity, dtype=torch.int64, device="cpu")
            self._forwards = torch.empty(self.capacity, dtype=torch.int32, device="cpu")
            self._condemned = torch.zeros(self.capacity, dtype=torch.bool, device="cpu")
        self._listed: Tensor | None = None
        """Rows by content, made where it is first asked for: int32, twice as many as there are entries."""
        self._listed_to = 0
        self._weights = hashing.weights(sources)
        self._rows: dict[int, int | tuple[int, ...]] = {}
        """Numbers of a hash's entries. Nearly all have one, and a number takes less than a tuple."""
        self._next = 0
        self.doubt = Doubt(doubt_bytes)
        self.forwards = 0
        self.entries = 0
        self.evicted = 0
        """How many entries were given up for others."""

    @property
    def size_bytes(self) -> int:
        """Host memory of the entries and of the doubt, in bytes."""
        return self.entries * self.entry_bytes + self.doubt.size_bytes

    def add(
        self, hashes: Tensor, sums: Tensor, values: Tensor, condemned: bool = False, who: Tensor | None = None
    ) -> None:
        """Adds rows: int64 ``[n]``, ``[n]`` and ``[n, sources]``. ``who``: int64 ``[n]``, see `Holder`; None: `NOBODY`.
        A present entry counts as used."""
        # What came from elsewhere may be of weights that this engine gets later.
        forwards = torch.full_like(hashes, NEVER if who is None else self.forwards)
        who = torch.full_like(hashes, NOBODY) if who is None else who
        for part in range(0, len(hashes), self.capacity):
            rest = slice(part, part + self.capacity)
            given = hashes[rest], torch.stack((sums[rest], who[rest], forwards[rest])), values[rest]
            while len(given[0]):
                again = self._add_first(*given, condemned)
                given = given[0][again], given[1][:, again], given[2][again]

    def match(self, hashes: Sequence[int], values: Tensor) -> list[Match]:
        """Compares blocks, by hash and values int64 ``[n, sources]``, with the entries."""
        pairs = [(i, number) for i, hash in enumerate(hashes) for number in self._numbers(hash)]
        found = [Match(0)] * len(hashes)
        if not pairs:
            return found
        block, number = torch.tensor(pairs, device="cpu").T
        rows = number % self.capacity
        different = (values[block] != self._values[rows]).sum(1).tolist()
        condemned = self._condemned[rows].tolist()
        for (i, number), differs, bad in zip(pairs, different, condemned, strict=True):
            best = found[i]
            equal = best.equal or not differs
            nearer = not bad and (best.nearest < 0 or differs < self._distance(best.nearest, values[i]))
            found[i] = Match(
                entries=best.entries + (not bad),
                equal=equal,
                condemned=best.condemned or (bad and not differs),
                nearest=number if nearer else best.nearest,
            )
        return found

    def values(self, number: int) -> Tensor:
        """Values of an entry named by `match`, until the next `add`: int64 ``[sources]``."""
        return self._values[number % self.capacity]

    def rows(self, hashes: Iterable[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Hash, sum and values of all entries with the given hashes (None: of all), without those found wrong."""
        wanted = self._rows if hashes is None else hashes
        numbers = [number for hash in wanted for number in self._numbers(hash)]
        rows = torch.tensor(numbers, dtype=torch.int64, device="cpu") % self.capacity
        rows = rows[~self._condemned[rows]]
        return self._hashes[rows], self._sums[rows], self._values[rows]

    def holders(self, values: Tensor) -> list[Holder | None]:
        """For each of ``values``, int64 ``[n, sources]``: an entry that was computed here with just this content,
        whatever its hash, present or given up; None for none, or where entries of different tokens have it. Now and
        then one is not found: two contents may have one place in the list."""
        listed = self._list()
        rows = listed[self._places(values)].long()
        safe = rows.clamp(min=0)
        # A listed row may hold another entry by now, of the same content from elsewhere.
        same = (rows >= 0) & self._proves(safe) & (self._values[safe] == values).all(1)
        about = self._hashes[safe], self._sums[safe], self._who[safe], self._forwards[safe].long()
        found = torch.stack(about, 1).tolist()
        return [Holder(*one) if held else None for one, held in zip(found, same.tolist(), strict=True)]

    def hashes(self, most: int) -> list[int]:
        """The prefix hashes of up to ``most`` entries, the newest first."""
        return list(islice(reversed(self._rows), most))

    def has(self, hash: int) -> bool:
        """Whether there are entries of ``hash``."""
        return hash in self._rows

    def _list(self) -> Tensor:
        """Rows by content, with all entries added so far."""
        if self._listed is None:
            with torch.inference_mode(False):
                self._listed = torch.full((2 * self.capacity,), _NONE, dtype=torch.int32, device="cpu")
        listed = self._listed
        first = max(self._listed_to, self._next - min(self.capacity, MOST_LISTED))
        rows = torch.arange(first, self._next, device="cpu") % self.capacity
        self._listed_to = self._next
        rows = rows[self._proves(rows)]
        places = self._places(self._values[rows])
        before = listed[places]
        listed[places] = torch.where(before == _SEVERAL, before, rows.int())
        # Others of this call, and those of earlier ones.
        for others in (before.long(), listed[places].long()):
            safe = others.clamp(min=0)
            clash = (others >= 0) & (self._sums[safe] != self._sums[rows])
            clash &= (self._values[safe] == self._values[rows]).all(1)
            listed[places[clash]] = _SEVERAL
        return listed

    def _proves(self, rows: Tensor) -> Tensor:
        """Whether the bytes of an entry were computed here, and not found wrong: bool ``[n]``."""
        return ~self._condemned[rows] & (self._who[rows] != NOBODY)

    def _places(self, values: Tensor) -> Tensor:
        """Where contents are listed: int64 ``[n]``."""
        return ((values * self._weights).sum(1) >> 1 & (1 << 62) - 1) % (2 * self.capacity)

    def _numbers(self, hash: int) -> tuple[int, ...]:
        rows = self._rows.get(hash, ())
        return rows if type(rows) is tuple else (rows,)  # type: ignore[return-value]

    def _distance(self, number: int, values: Tensor) -> int:
        return int((values != self.values(number)).sum())

    def _add_first(self, hashes: Tensor, about: Tensor, values: Tensor, condemned: bool) -> Tensor:
        """Adds the first entry of each hash; gives the indices of the others. ``about``: int64 ``[3, n]``, sums,
        writers and forwards."""
        listed: list[int] = hashes.tolist()
        first: dict[int, int] = {}
        again = [i for i, hash in enumerate(listed) if first.setdefault(hash, i) != i]
        fresh = list(first.values())
        if not self._rows.keys().isdisjoint(first):
            known = [i for hash, i in first.items() if hash in self._rows]
            variants = set(self._touch([listed[i] for i in known], known, values))
            fresh = [i for hash, i in first.items() if hash not in self._rows or i in variants]
        if len(fresh) == len(listed):
            self._append(listed, about, values, condemned)
        elif fresh:
            rows = torch.tensor(fresh, dtype=torch.int64, device="cpu")
            self._append([listed[i] for i in fresh], about[:, rows], values[rows], condemned)
        self.entries += len(fresh)
        return torch.tensor(again, dtype=torch.int64, device="cpu")

    def _touch(self, hashes: list[int], indices: list[int], values: Tensor) -> list[int]:
        """Of ``hashes`` that are known: those whose values, at ``indices``, are not stored yet, as indices. The entries
        of the others move to the front where they are old."""
        variants: list[int] = []
        old: list[int] = []
        overfull: list[int] = []
        for hash, i, match in zip(hashes, indices, self.match(hashes, values[indices]), strict=True):
            rows = self._numbers(hash)
            if not match.equal:
                if len(rows) < MOST_VARIANTS:
                    variants.append(i)
                else:
                    overfull.append(hash)
            elif self._next - rows[0] > self.capacity // 2:
                old.append(hash)
        self.doubt.add(overfull)
        numbers = [(hash, number) for hash in old for number in self._numbers(hash)]
        for hash in old:
            del self._rows[hash]
        if numbers:
            rows_ = torch.tensor([number for _, number in numbers], device="cpu") % self.capacity
            about = torch.stack((self._sums[rows_], self._who[rows_], self._forwards[rows_].long()))
            self._append([hash for hash, _ in numbers], about, self._values[rows_], self._condemned[rows_])
        return variants

    def _append(self, hashes: list[int], about: Tensor, values: Tensor, condemned: Tensor | bool) -> None:
        """At most `capacity` entries."""
        begin, self._next = self._next, self._next + len(hashes)
        self._evict(max(begin - self.capacity, 0), max(self._next - self.capacity, 0))
        first = begin % self.capacity
        rows: slice | Tensor = slice(first, first + len(hashes))
        if first + len(hashes) > self.capacity:
            rows = torch.arange(begin, self._next, device="cpu") % self.capacity
        self._hashes[rows] = torch.tensor(hashes, dtype=torch.int64, device="cpu")
        self._sums[rows], self._who[rows], self._forwards[rows] = about[0], about[1], about[2].int()
        self._values[rows], self._condemned[rows] = values, condemned
        if len(set(hashes)) == len(hashes) and self._rows.keys().isdisjoint(hashes):
            self._rows.update(zip(hashes, range(begin, self._next), strict=True))
            return
        for hash, number in zip(hashes, range(begin, self._next), strict=True):
            others = self._numbers(hash)
            self._rows[hash] = (*others, number) if others else number

    def _evict(self, begin: int, end: int) -> None:
        """Entries of these numbers are about to be overwritten."""
        if end <= begin:
            return
        numbers = range(begin, end)
        hashes = self._hashes[torch.arange(begin, end, device="cpu") % self.capacity].tolist()
        gone = []
        for number, hash in zip(numbers, hashes, strict=True):
            rows = self._rows.get(hash)
            # Else it has moved to the front, or went with another one of its hash.
            if rows == number or (type(rows) is tuple and number in rows):
                del self._rows[hash]
                gone.append(hash)
                count = len(rows) if type(rows) is tuple else 1
                self.entries -= count
                self.evicted += count
        self.doubt.add(gone)
