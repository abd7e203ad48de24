"""`BlockEvents`: actions of an engine's scheduler on blocks, reported to `Canary.slots` in few events."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from canary_core import Canary
from canary_core.ops.upload import upload

BlockSort = Literal["alloc", "park", "share", "evict", "free", "forget"]
"""`SlotEvents`' own."""


@dataclass(slots=True)
class BlockEvent:
    """An action on ``blocks``, in the scheduler's order. ``request``: its cause, None if unknown. ``group``: number of
    the engine's group, None for all."""

    sort: BlockSort
    request: str | None
    blocks: list[int]
    group: int | None = None


def add_event(events: list[BlockEvent], new: BlockEvent) -> None:
    """Appends ``new`` to ``events``, or joins it to the last one of the same request and sort. Nothing happens without
    blocks."""
    last = events[-1] if events else None
    if last is not None and (last.sort, last.request, last.group) == (new.sort, new.request, new.group):
        last.blocks += new.blocks
    elif new.blocks:
        events.append(new)


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """A region handed out by the engine in blocks. ``number``: of the engine's group. ``block``: slots of one."""

    region: str
    number: int
    block: int


class BlockEvents:
    """Reports events of the blocks of ``groups``, which take turns on them: each event goes to the regions of all
    groups, or of its own. A group that does not use a block gets it handed out and never written.

    ``writer``: the writer id of a request. ``judged``: whether misuse of blocks is a finding; else only their content
    is followed.
    """

    def __init__(
        self, canary: Canary, groups: Sequence[BlockGroup], writer: Callable[[str], int], judged: bool = True
    ) -> None:
        self._canary = canary
        self._groups = groups
        self._writer = writer
        self._judged = judged

    def tell(self, events: Sequence[BlockEvent]) -> None:
        """``events``, in order."""
        runs = runs_of(events)
        if not runs:
            return
        counts = [sum(len(event.blocks) for event in run) for run in runs]
        blocks = upload([b for run in runs for event in run for b in event.blocks], self._canary.device)
        for run, numbers in zip(runs, blocks.split(counts), strict=True):
            self._tell(run, numbers)

    def handed_out(
        self, events: Sequence[BlockEvent], given: Sequence[Sequence[Sequence[int]]], groups: Collection[int]
    ) -> None:
        """After `tell`, with the same events, where ``groups``, by number, take turns on the same memory. ``given``:
        blocks by group, of each request that got any. A block just handed out holds another group's bytes, and a write
        that leaves them unchanged is lost (`SlotEvents.adopt_bytes`): one look at the bytes of each block. Blocks given
        but not handed out, such as prefix hits, are left alone."""
        fresh = {block for event in events if event.sort == "alloc" for block in event.blocks}
        for group in self._groups:
            own = {block for lists in given for block in lists[group.number]} if group.number in groups else set()
            blocks = sorted(fresh & own)
            if blocks:
                self._canary.slots.adopt_bytes(group.region, block_slots(group, upload(blocks, self._canary.device)))

    def copied(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The engine copies blocks, (from, to), of all groups: the records go with the bytes."""
        blocks = upload([block for pair in pairs for block in pair], self._canary.device).view(-1, 2)
        for group in self._groups:
            source, destination = (block_slots(group, blocks[:, side]) for side in (0, 1))
            self._canary.slots.copy(group.region, source, destination)

    def _tell(self, events: Sequence[BlockEvent], numbers: Tensor) -> None:
        sort, chosen = events[0].sort, events[0].group
        slots = self._canary.slots
        writers = self._writers(events) if self._judged and sort != "forget" else None
        for group in self._groups:
            if chosen is not None and chosen != group.number:
                continue
            if sort == "forget":
                slots.forget(group.region, block_slots(group, numbers))
            elif writers is not None:
                getattr(slots, sort)(group.region, numbers, writers, page_slots=group.block)
            elif sort == "alloc":
                slots.clear(group.region, block_slots(group, numbers))

    def _writers(self, events: Sequence[BlockEvent]) -> int | Callable[[], Tensor]:
        ids = [-1 if event.request is None else self._writer(event.request) for event in events]
        if len(set(ids)) == 1:
            return ids[0]
        every = [i for i, event in zip(ids, events, strict=True) for _ in event.blocks]
        each = upload(every, self._canary.device, torch.int32)
        return lambda: each


def runs_of(events: Sequence[BlockEvent]) -> list[list[BlockEvent]]:
    """``events`` in runs of one sort, each reported as one event: at the start of a batch, each request shares some
    blocks and is given others. An event joins an earlier run of its sort, unless that run or a later one contains one
    of its blocks."""
    runs: list[tuple[list[BlockEvent], set[int]]] = []
    for event in events:
        blocks, like = set(event.blocks), (event.sort, event.group)
        # The last run that this must not come before, or may join.
        for run, touched in reversed(runs):
            if touched & blocks or (run[0].sort, run[0].group) == like:
                break
        else:
            run, touched = [], blocks
        if not run or touched & blocks:
            runs.append(([event], blocks))
        else:
            run.append(event)
            touched |= blocks
    return [run for run, _ in runs]


def block_slots(group: BlockGroup, blocks: Tensor) -> Tensor:
    """The slots of ``blocks``, numbers on the pool's device, in their order."""
    inside = torch.arange(group.block, device=blocks.device)
    return (blocks[:, None] * group.block + inside).flatten()
