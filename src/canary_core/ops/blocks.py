"""`BlockShape`: what makes a block, and how a list of slots names blocks."""

from typing import NamedTuple


class BlockShape(NamedTuple):
    """A block has ``slots`` slots. ``paged``: a block is a page of the pool, and is listed by its number, page ``n``
    having the slots from ``n * slots`` on; else all of its slots are listed, in the order of their sequence, and blocks
    one after the other."""

    slots: int
    paged: bool = False

    def blocks(self, listed: int) -> int:
        """How many complete blocks a list of so many numbers names."""
        return listed if self.paged else listed // self.slots

    def numbers(self, blocks: int) -> int:
        """How many numbers name so many blocks."""
        return blocks if self.paged else blocks * self.slots
