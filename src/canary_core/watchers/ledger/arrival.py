"""`Arrival`: bytes that came without a forward; `Origin`: their bringer, and its guarantees."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch
from torch import Tensor

from canary_core.errors import AttachError
from canary_core.ops.hashing import COMMON_ANCHOR, mix


@dataclass(frozen=True, slots=True)
class Origin:
    """Bringer of bytes: a connector, a host tier, another engine. ``name`` appears in findings.

    shared: others store there, too (a disk of earlier runs, a server of several engines), and their entries are not
    imported before the bytes come. They may have computed the same prefix with other numerics, so a difference proves
    nothing and counts as unknown. An origin that brings a prefix never kept by this engine counts as shared from then
    on, with a ``ledger_shared`` event; nor does a recompute tell a difference where KV of the origin may be.
    lossy: bytes may come back changed (quantised, compressed): a difference counts as lossy.
    """

    name: str
    shared: bool = False
    lossy: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Bytes for the last slots of one sequence, from ``origin``.

    slots: integer ``[n]`` on the pool's device, in the order of the sequence, each at most once; numbers beyond the
    region (a window's evicted slots) are left out.
    tokens: all token ids of the sequence up to the last of the slots, on the host. So the first slot is of position
    ``len(tokens) - n``.
    page_slots: slots of a block, the unit of comparison; block ``k`` holds positions ``k * page_slots`` and on.
    anchor: start of the sequence's prefix hash, as in `BatchView.anchors`; 0 where the prefix can't be judged.
    writer: the receiving request, -1 if unknown.

    Raises `AttachError` if shapes, dtypes or lengths don't fit together.
    """

    region: str
    slots: Tensor
    tokens: Sequence[int] | Tensor
    origin: Origin
    page_slots: int
    anchor: int = COMMON_ANCHOR
    writer: int = -1
    blocks: "Blocks" = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.page_slots, Integral) or self.page_slots < 1:
            raise AttachError(f"arrival: page_slots must be an integer of at least 1, got {self.page_slots!r}")
        count = len(self.slots)
        if len(self.tokens) < count:
            raise AttachError(
                f"arrival: tokens must be all of the sequence to the end of its {count} slots, got {len(self.tokens)}"
            )
        tokens = torch.as_tensor(self.tokens, dtype=torch.int64, device="cpu")
        object.__setattr__(self, "blocks", Blocks.of(tokens, len(tokens) - count, self.page_slots, self.anchor))


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The positions of a sequence from ``first`` on, and the complete blocks among them. All on the host.

    tokens, hashes: int64 ``[n]``, of each position; hashes 0 where unknown. skipped: positions before the first
    complete block. count: number of blocks. ends: int64 ``[count]``, the prefix hash at each block's last position;
    sums: its growth within the block.
    """

    first: int
    tokens: Tensor
    hashes: Tensor
    page_slots: int
    skipped: int
    count: int
    ends: Tensor
    sums: Tensor

    @classmethod
    def of(cls, tokens: Tensor, first: int, page_slots: int, anchor: int) -> "Blocks":
        """``tokens``: all of the sequence."""
        total = mix(tokens, torch.arange(len(tokens), device="cpu")).cumsum(0)
        hashes = total + anchor if anchor else torch.zeros_like(total)
        begin = -(-first // page_slots) * page_slots
        count = max((len(tokens) - begin) // page_slots, 0)
        last = torch.arange(1, count + 1, device="cpu") * page_slots + begin - 1
        before = last - page_slots
        grown = total[last] - torch.where(before >= 0, total[before.clamp(min=0)], 0)
        return cls(first, tokens[first:], hashes[first:], page_slots, begin - first, count, hashes[last], grown)

    def inside(self, slots: Tensor) -> Tensor:
        """The part of a list by position, ``[n]``, that is in complete blocks."""
        return slots[self.skipped : self.skipped + self.count * self.page_slots]

    def position(self, block: int) -> int:
        """The first position of block number ``block``."""
        return self.first + self.skipped + block * self.page_slots

    @property
    def partial(self) -> int:
        """Number of incomplete blocks."""
        rest = len(self.tokens) - self.skipped - self.count * self.page_slots
        return int(self.skipped > 0 and len(self.tokens) > 0) + int(rest > 0)


def block_hashes(tokens: Sequence[int] | Tensor, page_slots: int, anchor: int = COMMON_ANCHOR) -> list[int]:
    """The ledger's keys of a sequence's complete blocks, in order: the prefix hash at the last position of each."""
    every = torch.as_tensor(tokens, dtype=torch.int64, device="cpu")
    hashes: list[int] = Blocks.of(every, 0, page_slots, anchor).ends.tolist()
    return hashes
