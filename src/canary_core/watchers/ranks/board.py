"""`RankBoard`: a small file of one machine, mapped by all ranks of a group, with a row of each for each forward."""

import contextlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from canary_core.runtime.own_folder import is_own
from canary_core.watchers.ranks.digest import RankWord
from canary_core.watchers.ranks.group import RankGroup

VERSION = 1
"""Counts up when the meaning of the file changes."""

ROWS = 32
"""Rows of each rank that are kept, the last forwards'."""

ABOUT_BYTES = 1024
"""Place for a rank's introduction: a length and a checksum, four bytes each, and a JSON object."""


class RankBoard:
    """For each rank an introduction, and the rows of the last forwards in a ring. Each part has one writer, its rank;
    nobody waits for anybody, and a part read during a write counts as absent, by its checksum.

    The file lies in ``folder``, a folder of the present user alone, under a name made of group, parent process,
    ``interval`` and ``words``: ranks that differ in any of these do not meet. The file is removed once all ranks have
    mapped it. Raises `OSError` where the file can't be made.
    """

    def __init__(self, folder: Path, group: RankGroup, interval: int, words: int) -> None:
        self.group = group
        self._interval = interval
        self._words = words
        self._row = struct.Struct(f"<{words}q")
        self._rank_bytes = ABOUT_BYTES + ROWS * self._row.size
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_own(folder):
            raise PermissionError(f"somebody else may write to {folder}")
        same = (VERSION, group.name, group.size, os.getppid(), interval, words)
        self.path = folder / f"ranks-{blake2b(repr(same).encode(), digest_size=12).hexdigest()}"
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = self._rank_bytes * group.size
            self._file = os.fstat(file).st_ino
            # Only ever made larger: what others have written stays.
            if os.fstat(file).st_size < size:
                os.ftruncate(file, size)
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._map[self._begin(group.rank) : self._begin(group.rank) + self._rank_bytes] = bytes(self._rank_bytes)
        self._linked = True

    def say(self, about: Mapping[str, object]) -> None:
        """Introduces this rank. ``about``: plain values."""
        text = json.dumps(about).encode()[: ABOUT_BYTES - 8]
        begin = self._begin(self.group.rank)
        self._map[begin : begin + 8 + len(text)] = struct.pack("<II", len(text), zlib.crc32(text)) + text

    def about(self, rank: int) -> Mapping[str, Any] | None:
        """Introduction of a rank; None for an absent rank."""
        begin = self._begin(rank)
        length, checksum = struct.unpack_from("<II", self._map, begin)
        text = self._map[begin + 8 : begin + 8 + min(length, ABOUT_BYTES - 8)]
        if not length or zlib.crc32(text) != checksum:
            return None
        with contextlib.suppress(ValueError):
            found: Mapping[str, Any] = json.loads(text)
            return found
        return None

    def put(self, row: Sequence[int]) -> None:
        """Writes this rank's row of a forward, cut to the words of the board; sets the checksum."""
        packed = self._row.pack(0, *row[1 : self._words])
        whole = struct.pack("<q", zlib.crc32(packed[8:]) + 1) + packed[8:]
        begin = self._place(self.group.rank, row[RankWord.NUMBER])
        self._map[begin : begin + len(whole)] = whole

    def row(self, rank: int, number: int) -> Sequence[int] | None:
        """A rank's row of the forward ``number``; None where the row has not come, or is overwritten."""
        begin = self._place(rank, number)
        whole = self._map[begin : begin + self._row.size]
        found = self._row.unpack(whole)
        right = found[RankWord.CHECKSUM] == zlib.crc32(whole[8:]) + 1
        return found if right and found[RankWord.NUMBER] == number else None

    def unlink(self) -> None:
        """Removes the file; its mappings stay."""
        if self._linked:
            self._linked = False
            with contextlib.suppress(OSError):
                # Another group, begun anew, may have put its own there.
                if self.path.stat().st_ino == self._file:
                    self.path.unlink()

    def close(self) -> None:
        """Ends this rank's part."""
        with contextlib.suppress(OSError, ValueError):
            begin = self._begin(self.group.rank)
            self._map[begin : begin + 8] = bytes(8)
            self._map.close()
            self.unlink()

    def _begin(self, rank: int) -> int:
        return rank * self._rank_bytes

    def _place(self, rank: int, number: int) -> int:
        return self._begin(rank) + ABOUT_BYTES + number // self._interval % ROWS * self._row.size
