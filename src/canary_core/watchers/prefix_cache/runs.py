"""A prefix cache's and its allocator's claims about slots: `CachedRun` and `FreeList`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNKNOWN = -1
"""A token not given by the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedRun:
    """Consecutive tokens of one node of a prefix cache.

    node: the engine's number of the node, None if there is none. first: position of the first token. slots: integer
    ``[n]`` on the pool's device, numbered as in the engine's tables. before: ``[1]``, the slot of the token before,
    None without one on the device. tokens: int64 ``[n]`` on the host, `UNKNOWN` where the cache gives none, None if it
    gives none at all. absent: regions without slots for the run (a window that has passed).
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
    """An allocator's free pages of ``page_size`` slots, as of the moment when the runs are read: slots of ``region``,
    or, if None, numbers as in `CachedRun.slots`. ``slots``: number of slots in all."""

    region: str | None
    pages: tuple[Tensor, ...]
    page_size: int
    slots: int

    def contain(self, slot: Tensor) -> Tensor:
        """Whether each of ``slot`` is free, bool; False for numbers beyond the slots."""
        count = -(-self.slots // self.page_size)
        free = torch.zeros(count, dtype=torch.bool, device=slot.device)
        for pages in self.pages:
            # Not an assignment, for which the number would be copied from the host.
            free.index_fill_(0, pages.long().clamp(0, count - 1), True)
        inside = (slot >= 0) & (slot < self.slots)
        return inside & free[torch.where(inside, slot, 0) // self.page_size]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The tokens of several runs, one after another, on the host. All int64 ``[n]``: number of the run, position, token
    (`UNKNOWN` where it can't be judged), and index within the run. ``before``: place of the token before each run's
    first one, as an index into the numbers read: first all runs' slots, then `CachedRun.before` of the runs that have
    one; -1 for none."""

    runs: Sequence[CachedRun]
    run: Tensor
    position: Tensor
    token: Tensor
    inside: Tensor
    before: Tensor

    @classmethod
    def of(cls, runs: Sequence[CachedRun], vocabulary: int) -> "Entries":
        """Entries of ``runs``. Tokens from ``vocabulary`` on were never seen by a forward, and can't be judged."""
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
        """The node of ``entry``."""
        return self.runs[int(self.run[entry])].node

    def absent(self, region: str) -> Tensor:
        """Whether each entry's run must have no slots in ``region``, bool ``[n]``."""
        return torch.tensor([region in run.absent for run in self.runs], device="cpu")[self.run]
