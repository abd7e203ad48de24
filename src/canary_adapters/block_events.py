"""`BlockEvents`: actions of an engine's scheduler on blocks, reported to `Canary.slots` in few events."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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

    def tell(self, events: Sequence[BlockEvent]) -> Sequence[tuple[Sequence[BlockEvent], Tensor]]:
        """``events``, in order. Returns each run of `runs_of`, with the numbers of its blocks on the pool's device."""
        runs = runs_of(events)
        if not runs:
            return ()
        blocks: list[int] = []
        counts = []
        for run in runs:
            before = len(blocks)
            for event in run:
                blocks += event.blocks
            counts.append(len(blocks) - before)
        numbers = upload(blocks, self._canary.device)
        told = list(zip(runs, numbers.split(counts) if len(runs) > 1 else (numbers,), strict=True))
        changes: list[Any] = []
        ids: dict[str | None, int] = {None: -1}
        for run, numbers in told:
            sort, chosen = run[0].sort, run[0].group
            owned = self._judged and sort != "forget"
            writers = self._writers(run, ids) if owned else None
            for group in self._groups:
                if chosen is not None and chosen != group.number:
                    continue
                if owned:
                    changes.append(((sort, group.region, group.block), numbers, writers))
                    continue
                # Only what comes before.
                self._report(changes)
                if sort == "forget":
                    self._canary.slots.forget(group.region, block_slots(group, numbers))
                elif sort == "alloc":
                    self._canary.slots.clear(group.region, block_slots(group, numbers))
        self._report(changes)
        return told

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

    def _report(self, changes: list[Any]) -> None:
        if changes:
            self._canary.slots.report(changes)
            changes.clear()

    def _writers(self, events: Sequence[BlockEvent], ids: dict[str | None, int]) -> int | Callable[[], Tensor]:
        """``ids``: of requests, as far as they are known; new ones are added."""
        own = []
        for event in events:
            known = ids.get(event.request)
            if known is None:
                known = ids[event.request] = self._writer(event.request or "")
            own.append(known)
        if own.count(own[0]) == len(own):
            return own[0]
        every = [i for i, event in zip(own, events, strict=True) for _ in event.blocks]
        each = upload(every, self._canary.device, torch.int32)
        return lambda: each


def runs_of(events: Sequence[BlockEvent]) -> list[list[BlockEvent]]:
    """``events`` in runs of one sort, each reported as one event: at the start of a batch, each request shares some
    blocks and is given others. An event joins an earlier run of its sort, unless that run or a later one contains one
    of its blocks."""
    runs: list[_Run] = []
    sorts = set()
    for event in events:
        like = event.sort, event.group
        # The first of a sort can't join. Of a request alone all are, and no set is made of its blocks.
        run = _joined(runs, event) if like in sorts else None
        if run is None:
            sorts.add(like)
            runs.append(_Run([event]))
        else:
            run.add(event)
    return [run.events for run in runs]


class _Run:
    def __init__(self, events: list[BlockEvent]) -> None:
        self.events = events
        self._blocks: set[int] | None = None

    def add(self, event: BlockEvent) -> None:
        self.events.append(event)
        self.blocks.update(event.blocks)

    @property
    def blocks(self) -> set[int]:
        if self._blocks is None:
            self._blocks = set(self.events[0].blocks)
        return self._blocks


def _joined(runs: Sequence[_Run], event: BlockEvent) -> _Run | None:
    """The run for ``event`` to join; None where the event must not come before a later run."""
    for run in reversed(runs):
        if not run.blocks.isdisjoint(event.blocks):
            return None
        if (run.events[0].sort, run.events[0].group) == (event.sort, event.group):
            return run
    return None


def block_slots(group: BlockGroup, blocks: Tensor) -> Tensor:
    """The slots of ``blocks``, numbers on the pool's device, in their order."""
    inside = torch.arange(group.block, device=blocks.device)
    return torch.add(inside, blocks[:, None], alpha=group.block).flatten()
