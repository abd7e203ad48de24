"""Follows an allocator's list of free pages.

The effect of a call is seen in the list: pages gone from the list were handed out, new pages in the list were freed. So
the inner workings of a call do not matter (groups, segments, deduplication). The cost is a few comparisons of lengths
on the host. The pages themselves are views of the lists, replaced by SGLang and never changed in place.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from canary_core import Canary, StreamSet
from canary_sglang.allocator.owners import Owners
from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import allocators

Freeing = Literal["free", "evict", "either"]
"""Whether requests freed pages, or a prefix cache evicted parked ones. Where a group of frees ends it may be either."""


class Follower:
    """Follows one allocator's list of free pages. ``regions``: how many slots a page has in each region."""

    def __init__(self, allocator: Any, canary: Canary, regions: Mapping[str, int], writers: RequestWriters) -> None:
        self.regions = regions
        self._allocator = allocator
        self._canary = canary
        self._writers = writers
        self._appends = allocators.appends(allocator)
        # Pages that SGLang frees at the end of a group, by the function that was given them: the writer id of the
        # request that frees them, and how many they are; -1 if that is known only at the end.
        self._waiting: dict[str, list[tuple[int, int]]] = {}
        self._evicted_waits = False
        self._run: _Run | None = None
        self._usual_place = ("free", self._appends)
        self._pages = allocators.free_pages_reader(allocator)
        self._remember()

    def intact(self) -> bool:
        """Whether the list is still the last remembered one."""
        return self._pages(self._allocator) is self._free and self._same(allocators.released_pages(self._allocator))

    def called(self, name: str, owners: Owners, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Reports the effect on the list of the allocator's function ``name``, just run with these arguments. False if
        the list changed in a way unknown for the function."""
        if name in allocators.FREES:
            pages = args[0] if args else next(iter(kwargs.values()), None)
            return self._explained(name, owners, pages) or self._taken_back(name, owners)
        if name == allocators.RESTORE:
            return self._taken_back(name, owners)
        self._tell_run()
        if name == allocators.CLEAR:
            self._cleared()
        elif name == allocators.MERGE:
            self._remember()
        else:
            return self._handed_out(owners, allocators.page_shares(name, self._allocator, args, kwargs))
        return True

    def listed(self) -> int:
        """How many pages are in the list, sorted in or not."""
        released = allocators.released_pages(self._allocator)
        return len(self._pages(self._allocator)) + sum(len(part) for part in released)

    def evicted_waits(self) -> None:
        """The prefix cache has evicted pages that will come into the list only at the end of a group of frees, together
        with requests' pages."""
        self._evicted_waits = True

    def _remember(self) -> None:
        self._free = self._pages(self._allocator)
        self._released = tuple(allocators.released_pages(self._allocator))

    def _cleared(self) -> None:
        self._waiting.clear()
        self._evicted_waits = False
        self._remember()
        for name in self.regions:
            self._canary.slots.clear(name, None)

    def _handed_out(self, owners: Owners, shares: Sequence[int] | None) -> bool:
        before = self._free
        self._remember()
        count = len(before) - len(self._free)
        if count > 0:
            # SGLang takes states before it knows which request will get them.
            taker = -1 if allocators.hands_out_states(self._allocator) else owners.taker(count, shares)
            for region, page_slots in self.regions.items():
                self._canary.slots.alloc(region, before[:count], taker, page_slots)
        return count >= 0

    def _same(self, released: Sequence[Tensor]) -> bool:
        known = self._released
        if len(released) == len(known) == 1:
            return released[0] is known[0]
        return len(released) == len(known) and all(map(operator.is_, released, known))

    def _explained(self, name: str, owners: Owners, pages: Any) -> bool:
        """Handles the two usual cases of a free: the pages wait for the end of a group, or continue the run. False in
        all others. These two must be fast: each request of an ending batch frees its own pages, and the engine waits
        for its host meanwhile."""
        if not self._same(allocators.released_pages(self._allocator)):
            return False
        free, run = self._pages(self._allocator), self._run
        if free is self._free:
            if isinstance(pages, Tensor) and pages.numel():
                count = allocators.freed_pages(name, self._allocator, pages)
                self._waiting.setdefault(name, []).append((owners.freer(), count))
            return True
        count = free.numel() - self._free.numel()
        if run is None or self._waiting or run.place != self._usual_place or count <= 0:
            return False
        if run.event != ("evict" if owners.evicting() else "free"):
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
        event: Freeing = "evict" if owners.evicting() else "free"
        if self._evicted_waits and grown:
            event = "either"
        run = self._run
        if not sound or (grown and run is not None and (list(grown), event) != ([run.place], run.event)):
            self._tell_run()
        self._remember()
        if grown:
            # A group may end in a function that was given no pages itself, such as ``free_group_end``.
            given_to = name if name in self._waiting else next(iter(self._waiting), name)
            shares = self._waiting.pop(given_to, None) or [(owners.freer(), -1)]
            # A group may come back in parts.
            self._evicted_waits = self._evicted_waits and bool(self._waiting)
        for place, count in grown.items():
            if self._run is None or self._run.place != place:
                # A run has pages of one place: if both lists grew, each of them is told alone.
                self._tell_run()
                self._run = _Run(place, event, now_free.device)
                self._canary.slots.defer(self._tell_run)
            self._run.grow(count, _known_shares(shares, count), staged if place[0] == "staged" else ())
        return sound

    def _tell_run(self) -> None:
        """Ends the run and reports its pages, in the lists as last remembered."""
        run, self._run = self._run, None
        if run is None:
            return
        pages = run.pages(self._free, self._released)
        owner = run.owner(self._writers)
        for region, page_slots in self.regions.items():
            if run.event == "either":
                self._canary.slots.share(region, pages, owner, page_slots, run.ready())
            tell = self._canary.slots.evict if run.event == "evict" else self._canary.slots.free
            tell(region, pages, owner, page_slots, run.ready())


class _Run:
    """Pages freed by several calls, one after another, to the same end of a list. At the end of a batch, each request
    frees its own pages. All are reported as one event, with a view of the last list: views of the earlier lists,
    replaced by SGLang, would hold megabytes of memory each.

    ``place``: ``free``, ``released`` or ``staged``; and whether pages are appended there. ``event``: the kind of
    report.
    """

    def __init__(self, place: tuple[str, bool], event: Freeing, device: torch.device) -> None:
        self.place = place
        self.event = event
        self._streams = StreamSet(device)
        self._count = 0
        self._parts: list[Tensor] = []
        self._shares: list[Sequence[tuple[int, int]]] = []

    def grow(self, count: int, shares: Sequence[tuple[int, int]], parts: Sequence[Tensor] = ()) -> None:
        """Adds ``count`` pages, freed on the current stream. ``shares``: writer ids, with each one's number of freed
        pages. ``parts``: the pages themselves, if ``staged``."""
        self._streams.add()
        self._count += count
        self._shares.append(shares)
        self._parts += parts

    def ready(self) -> list[torch.cuda.Event]:
        """Events after which `pages` are valid, one for each stream of a free."""
        return self._streams.ready()

    def pages(self, free: Tensor, released: Sequence[Tensor]) -> Tensor:
        """All pages of the run, in the lists' order. ``free`` and ``released``: the lists now."""
        where, at_end = self.place
        if where == "staged":
            return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        pages = free if where == "free" else released[0]
        return pages[-self._count :] if at_end else pages[: self._count]

    def owner(self, writers: RequestWriters) -> int | Callable[[], Tensor]:
        """Writer id that freed the `pages`; for several, a function that returns one for each page."""
        ordered = self._shares if self.place[1] else self._shares[::-1]
        shares = [share for group in ordered for share in group]
        ids, counts = [writer for writer, _ in shares], [count for _, count in shares]
        return writers.each(ids, counts)


def _known_shares(shares: Sequence[tuple[int, int]], count: int) -> Sequence[tuple[int, int]]:
    """``shares`` (writer ids, and how many pages each freed, -1 if unknown) if they sum up to ``count``. If not, one
    share of all pages: of the only writer, or of -1 if there are several."""
    if min(share for _, share in shares) >= 0 and sum(share for _, share in shares) == count:
        return shares
    writers = {writer for writer, _ in shares}
    return ((writers.pop() if len(writers) == 1 else -1, count),)
