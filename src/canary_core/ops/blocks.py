"""`BlockShape`: size of a block, and the form of a list of blocks."""

from typing import NamedTuple


class BlockShape(NamedTuple):
    """A block has ``slots`` slots. ``paged``: a block is a page of the pool and is listed by number, page ``n`` with
    the slots from ``n * slots`` on; otherwise all slots are listed, in the order of the sequence, block after block."""

    slots: int
    paged: bool = False

    def blocks(self, listed: int) -> int:
        """How many complete blocks a list of so many numbers names."""
        return listed if self.paged else listed // self.slots

    def numbers(self, blocks: int) -> int:
        """How many numbers name so many blocks."""
        return blocks if self.paged else blocks * self.slots
