"""What became of an allocator's list of free pages.

What a call of an allocator really did is what the list lost or gained, however the call got there (groups, segments,
deduplication), so that is what is followed: it costs a few comparisons of lengths on the host, and the pages themselves
are views of the lists, which SGLang replaces and never changes in place.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canary_core import Canary, StreamSet
from canary_sglang.allocator.owners import Owners
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import allocators


class Follower:
    """One list of free pages. ``regions``: the slots that a page has in each region it stands for."""

    def __init__(self, allocator: Any, canary: Canary, regions: Mapping[str, int], writers: RequestWriters) -> None:
        self.regions = regions
        self._allocator = allocator
        self._canary = canary
        self._writers = writers
        self._appends = type(allocator).__name__ in allocators.APPENDING_ALLOCATORS
        # Pages that wait for the end of a group, by the function that took them: whose, and how many; -1 for a number
        # that only the end will tell.
        self._waiting: dict[str, list[tuple[int, int]]] = {}
        self._run: _Run | None = None
        self._usual_place = ("free", self._appends)
        self._pages = allocators.free_list(allocator)
        self._look()

    def intact(self) -> bool:
        """Whether the list is still what our last look at it left."""
        return self._pages(self._allocator) is self._free and self._same(allocators.released_pages(self._allocator))

    def called(self, name: str, owners: Owners, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tells what the function ``name`` of the allocator, which has just run with these arguments, did to the list.
        False where it did what a function of this name doesn't do."""
        if name in allocators.FREES:
            pages = args[0] if args else next(iter(kwargs.values()), None)
            return self._more(name, owners, pages) or self._taken_back(name, owners)
        if name == allocators.RESTORE:
            return self._taken_back(name, owners)
        self._tell()
        if name == allocators.CLEAR:
            self._cleared()
        elif name == allocators.MERGE:
            self._look()
        else:
            return self._handed_out(owners, allocators.page_shares(name, self._allocator, args, kwargs))
        return True

    def _look(self) -> None:
        self._free = self._pages(self._allocator)
        self._released = tuple(allocators.released_pages(self._allocator))

    def _cleared(self) -> None:
        self._waiting.clear()
        self._look()
        for name in self.regions:
            self._canary.slots.clear(name, None)

    def _handed_out(self, owners: Owners, shares: Sequence[int] | None) -> bool:
        before = self._free
        self._look()
        count = len(before) - len(self._free)
        if count > 0:
            # States are taken ahead for whoever waits, so nothing says who gets them.
            taker = -1 if allocators.hands_out_states(self._allocator) else owners.taker(count, shares)
            for region, page_slots in self.regions.items():
                self._canary.slots.alloc(region, before[:count], taker, page_slots)
        return count >= 0

    def _same(self, released: Sequence[Tensor]) -> bool:
        known = self._released
        if len(released) == len(known) == 1:
            return released[0] is known[0]
        return len(released) == len(known) and all(map(operator.is_, released, known))

    def _more(self, name: str, owners: Owners, pages: Any) -> bool:
        """Whether what came back waits for the end of a group, or is more of a run: then no more needs to be found out.
        Of a batch of requests that end, each gives back its own, and an engine waits for its host meanwhile."""
        if not self._same(allocators.released_pages(self._allocator)):
            return False
        free, run = self._pages(self._allocator), self._run
        if free is self._free:
            if isinstance(pages, Tensor) and pages.numel():
                self._waiting.setdefault(name, []).append((owners.freer(), self._count(name, pages)))
            return True
        count = free.numel() - self._free.numel()
        if run is None or self._waiting or run.place != self._usual_place or count <= 0:
            return False
        self._free = free
        run.grow(count, ((owners.freer(), count),))
        return True

    def _taken_back(self, name: str, owners: Owners) -> bool:
        free, released = self._free, self._released
        now_free, now_released = self._pages(self._allocator), allocators.released_pages(self._allocator)
        at_end = self._appends and name != allocators.RESTORE
        back = {("free", at_end): len(now_free) - len(free)}
        staged: Sequence[Tensor] = ()
        if len(now_released) == len(released) == 1:
            back["released", at_end] = len(now_released[0]) - len(released[0])
        else:
            staged = now_released[len(released) :]
            back["staged", True] = sum(len(part) for part in staged)
        sound = len(now_released) >= len(released) and min(back.values()) >= 0
        grown = {place: count for place, count in back.items() if count > 0}
        if not sound or (grown and self._run is not None and list(grown) != [self._run.place]):
            self._tell()
        self._look()
        if grown:
            # What a group gathered comes back under the name of its end where a function of its own has no part in it.
            pile = name if name in self._waiting else next(iter(self._waiting), name)
            shares = self._waiting.pop(pile, None) or [(owners.freer(), -1)]
        for place, count in grown.items():
            if self._run is None or self._run.place != place:
                # Of both lists at once there is no run: each is told by itself.
                self._tell()
                self._run = _Run(place, now_free.device)
                self._canary.slots.defer(self._tell)
            self._run.grow(count, _sure(shares, count), staged if place[0] == "staged" else ())
        return sound

    def _count(self, name: str, pages: Tensor) -> int:
        if self._appends or name == "free_page_ids":
            return len(pages)
        return -(-len(pages) // self._allocator.page_size) if name == "free_segment" else -1

    def _tell(self) -> None:
        """The run is at its end, its pages are in the lists as they were looked at last."""
        run, self._run = self._run, None
        if run is None:
            return
        pages = run.pages(self._free, self._released)
        owner = run.owner(self._writers)
        for region, page_slots in self.regions.items():
            self._canary.slots.free(region, pages, owner, page_slots, run.ready())


class _Run:
    """Pages that came back in a row to one end of a list: a batch of requests that end gives them back one by one. They
    are told as one event, of the list as it is in the end: views of those that SGLang replaced meanwhile would keep
    their memory, megabytes each.

    ``place``: ``free``, ``released`` or ``staged``, and whether pages are appended to it."""

    def __init__(self, place: tuple[str, bool], device: torch.device) -> None:
        self.place = place
        self._streams = StreamSet(device)
        self._count = 0
        self._parts: list[Tensor] = []
        self._shares: list[Sequence[tuple[int, int]]] = []

    def grow(self, count: int, shares: Sequence[tuple[int, int]], parts: Sequence[Tensor] = ()) -> None:
        """``count`` more pages, on the current stream; ``parts``: themselves, where no list holds them. ``shares``:
        whose they are, and how many of each."""
        self._streams.add()
        self._count += count
        self._shares.append(shares)
        self._parts += parts

    def ready(self) -> list[torch.cuda.Event]:
        """After which `pages` are there: what the streams have to do on which they came back."""
        return self._streams.ready()

    def pages(self, free: Tensor, released: Sequence[Tensor]) -> Tensor:
        """All of them, in the lists' order."""
        where, at_end = self.place
        if where == "staged":
            return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        pages = free if where == "free" else released[0]
        return pages[-self._count :] if at_end else pages[: self._count]

    def owner(self, writers: RequestWriters) -> int | Callable[[], Tensor]:
        """Whose each of `pages` was."""
        ordered = self._shares if self.place[1] else self._shares[::-1]
        shares = [share for group in ordered for share in group]
        ids, counts = [writer for writer, _ in shares], [count for _, count in shares]
        return ids[0] if len(set(ids)) == 1 else partial(writers.spread, ids, counts)


def _sure(shares: Sequence[tuple[int, int]], count: int) -> Sequence[tuple[int, int]]:
    """``shares``, writers and how many of ``count`` pages each had, -1 if that isn't known; if they don't come to
    ``count``, all are the writer's, where there is only one, else nobody's."""
    if min(share for _, share in shares) >= 0 and sum(share for _, share in shares) == count:
        return shares
    writers = {writer for writer, _ in shares}
    return ((writers.pop() if len(writers) == 1 else -1, count),)
