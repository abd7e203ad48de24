"""What a prefix cache and its allocator say of slots: `CachedRun` and `FreeList`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNKNOWN = -1
"""A token that the cache doesn't tell."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedRun:
    """Consecutive tokens of one node of a prefix cache.

    node: the engine's number of it, None if it has none. first: position of the first token. slots: integer ``[n]`` on
    the pool's device, the numbers that the engine's tables use. before: ``[1]``, the slot of the token before, None if
    there is none or it is nowhere on the device. tokens: int64 ``[n]`` on the host, `UNKNOWN` where the cache doesn't
    say, None for none. absent: regions in which the run must have no slots (a window that has passed).
    """

    node: int | None
    first: int
    slots: Tensor
    before: Tensor | None = None
    tokens: Tensor | None = None
    absent: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class FreeList:
    """Pages of ``page_size`` slots that an allocator has free, as it has them when the runs are read: slots of
    ``region``, or where that is None the numbers of `CachedRun.slots`. ``slots``: how many there are in all."""

    region: str | None
    pages: tuple[Tensor, ...]
    page_size: int
    slots: int

    def contain(self, slot: Tensor) -> Tensor:
        """Which of ``slot`` are free, bool; numbers that are no slots are not."""
        count = -(-self.slots // self.page_size)
        free = torch.zeros(count, dtype=torch.bool, device=slot.device)
        for pages in self.pages:
            # Not an assignment, for which the number would be copied from the host.
            free.index_fill_(0, pages.long().clamp(0, count - 1), True)
        inside = (slot >= 0) & (slot < self.slots)
        return inside & free[torch.where(inside, slot, 0) // self.page_size]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The tokens of several runs, one after another, on the host. All int64 ``[n]``: number of its run, position,
    token (`UNKNOWN` where it can't be judged), and index within the run. ``before``: where the token before the run's
    first one is found, as an index into the numbers that were read: first all runs' slots, then `CachedRun.before` of
    those that have one; -1 for runs without."""

    runs: Sequence[CachedRun]
    run: Tensor
    position: Tensor
    token: Tensor
    inside: Tensor
    before: Tensor

    @classmethod
    def of(cls, runs: Sequence[CachedRun], vocabulary: int) -> "Entries":
        """Tokens of ``vocabulary`` and above are none that a forward has seen: they can't be judged."""
        lengths = torch.tensor([len(run) for run in runs], device="cpu")
        count = int(lengths.sum())
        run = torch.repeat_interleave(torch.arange(len(runs), device="cpu"), lengths)
        inside = torch.arange(count, device="cpu") - (lengths.cumsum(0) - lengths)[run]
        first = torch.tensor([item.first for item in runs], device="cpu")
        has = torch.tensor([item.before is not None for item in runs], device="cpu")
        before = torch.where(has, count + has.long().cumsum(0) - 1, -1)
        tokens = [
            torch.full((len(item),), UNKNOWN, dtype=torch.int64, device="cpu") if item.tokens is None else item.tokens
            for item in runs
        ]
        token = torch.cat(tokens)
        token = torch.where((token < 0) | (token >= vocabulary), UNKNOWN, token)
        return cls(runs, run, first[run] + inside, token, inside, before[run])

    def __len__(self) -> int:
        return self.run.shape[0]

    def node(self, entry: int) -> int | None:
        """The node that ``entry`` is of."""
        return self.runs[int(self.run[entry])].node

    def absent(self, region: str) -> Tensor:
        """Entries of runs that must have no slots in ``region``, bool ``[n]``."""
        return torch.tensor([region in run.absent for run in self.runs], device="cpu")[self.run]
