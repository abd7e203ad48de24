"""`HashChain`: which cached blocks were computed from which, by the engine's own hashes of prefixes."""

from collections.abc import Iterable, Mapping, Sequence

UNKNOWN = b""
"""In the place of the hash before a block with an unknown origin."""

MOST_HASHES = 1 << 20
"""Hashes remembered; blocks of older ones count as of unknown origin."""


class HashChain:
    """For each hash of a cached block the hash of the block before. A block's KV is computed from all blocks before, so
    once one of these is wrong, the block is, too."""

    def __init__(self) -> None:
        self._before: dict[bytes, bytes | None] = {}

    def note(self, hashes: Sequence[bytes | None], first: int) -> None:
        """``hashes``: of a request's blocks from the start, None where a block is not cached; those from number
        ``first`` on are new."""
        for number in range(first, len(hashes)):
            own = hashes[number]
            if own is not None:
                self._before.pop(own, None)
                self._before[own] = (hashes[number - 1] or UNKNOWN) if number else None
        while len(self._before) > MOST_HASHES:
            self._before.pop(next(iter(self._before)))

    def after(self, wrong: Iterable[int], cached: Mapping[int, bytes]) -> set[int]:
        """The blocks among ``cached`` (hash by number) that are ``wrong``, or computed from such a block, or of unknown
        origin."""
        right: dict[bytes, bool] = {cached[block]: False for block in wrong}
        right[UNKNOWN] = False
        return {block for block, hash in cached.items() if not self._right(hash, right)}

    def _right(self, hash: bytes, right: dict[bytes, bool]) -> bool:
        """Whether no block up to ``hash`` is wrong. ``right``: known results, to which new ones are added."""
        chain = []
        at: bytes | None = hash
        while at is not None and at not in right:
            chain.append(at)
            at = self._before.get(at, UNKNOWN)
        found = at is None or right[at]
        right.update(dict.fromkeys(chain, found))
        return found
