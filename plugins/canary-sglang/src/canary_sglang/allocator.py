"""What SGLang's allocators hand out and take back, as lifetime events of the core.

An allocator keeps a list of free pages. What a call of it really did is what that list lost or gained, however the call
got there (groups, segments, deduplication), so that is what is followed: it costs a few comparisons of lengths on the
host, and the pages themselves are views of the lists, which SGLang replaces and never changes in place. Nothing
waits for the device; the core lets events take effect before the next forward, on its stream.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from canary_core.canary import Canary
from canary_core.events import Event
from canary_core.region import Region
from canary_core.streams import current, current_handle
from canary_sglang import states
from canary_sglang.layout import allocators, batches, schedulers, targets
from canary_sglang.writers import RequestWriters


class Lifetime:
    """The allocator of one runner, followed; ``owners`` says on whose behalf it is called at the moment.

    What can't be followed is told with a ``lifetime_off`` event, and from then on no slot of it counts as freed.
    """

    def __init__(self, runner: Any, canary: Canary, writers: RequestWriters) -> None:
        self._canary = canary
        self.owners = Owners(writers)
        self._followers: dict[int, Follower] = {}
        allocator = runner.token_to_kv_pool_allocator
        refusal = allocators.lifetime_refusal(runner)
        if refusal is not None:
            self._off(canary.regions, refusal)
            return
        # Keeps the lists' owners alive, which are known by their ids.
        self._lists = allocators.free_lists(allocator)
        states_allocator = allocators.state_allocator(runner)
        if allocators.hands_out_states(states_allocator):
            self._lists[states.REGION] = states_allocator
        lists = {**allocators.ALLOCATED_REGIONS, states.REGION: states.REGION}
        wanted = {name: r for name, r in canary.regions.items() if name in lists}
        for kind, part in self._lists.items():
            # A page has the same number in all regions that share a list, and so many slots in each.
            slots = {n: _page_slots(part, r) for n, r in wanted.items() if lists[n] == kind}
            followed = {name: count for name, count in slots.items() if count}
            if followed:
                self._followers[id(part)] = Follower(part, canary, followed, writers)
        left = wanted.keys() - {name for f in self._followers.values() for name in f.regions}
        if left:
            unknown = states_allocator if left == {states.REGION} else allocator
            self._off(left, f"{type(unknown).__name__} is not an allocator that this canary-sglang knows")

    def call(self, name: str, original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs one function of an allocator and tells what it did."""
        follower = self._followers.get(id(allocator))
        if follower is None or not self._canary.enabled:
            return original(allocator, *args, **kwargs)
        # A cleared list is whole again, whatever happened to it before, say while Canary was switched off.
        intact = name == allocators.CLEAR or follower.intact()
        result = original(allocator, *args, **kwargs)
        try:
            if not intact or not follower.called(name, self.owners, args, kwargs):
                del self._followers[id(allocator)]
                for region in follower.regions:
                    self._canary.end_lifetime(region)
                self._off(follower.regions, f"the free list was changed by something else than {name} and its like")
        except Exception as error:
            self._canary.fail(f"canary_sglang: {name}", error)
        return result

    def _off(self, regions: Collection[str], reason: str) -> None:
        self._canary.tell(Event("lifetime_off", "warning", {"regions": sorted(regions), "reason": reason}))


class Owners:
    """On whose behalf the allocator is called: the batch that is prepared, the request that lets go."""

    def __init__(self, writers: RequestWriters) -> None:
        self._writers = writers
        self._batch: Any = None
        self._request: str | None = None
        self._ahead: _Ahead | None = None

    @contextmanager
    def preparing(self, batch: Any, decode: bool = False) -> Iterator[None]:
        """What is handed out meanwhile is for the requests of ``batch``, an extend or a decode."""
        before, self._batch = (self._batch, self._ahead), batch
        self._ahead = ahead = _Ahead(batch) if decode and batches.speculates(batch) else None
        try:
            yield
        finally:
            self._batch, self._ahead = before
            if ahead is not None:
                ahead.prepared()

    @contextmanager
    def releasing(self, request: Any) -> Iterator[None]:
        """What is taken back meanwhile was given up by ``request``."""
        before, self._request = self._request, request.rid
        try:
            yield
        finally:
            self._request = before

    def freer(self) -> int:
        """Writer id of the request that lets go, -1 where the engine does so of its own accord, as in an eviction."""
        return -1 if self._request is None else self._writers.id(self._request)

    def taker(self, count: int, shares: Sequence[int] | None) -> int | Callable[[], int | Tensor]:
        """Who gets ``count`` pages of which each request of the batch gets ``shares``, in its order; None for one each
        or, where slots are handed out one by one, what its extend needs, or what it has more of once it was prepared to
        draft ahead."""
        if self._batch is None or not count:
            return -1
        names = [request.rid for request in self._batch.reqs]
        if len(names) == 1:
            return partial(self._writers.id, names[0])
        if shares is None and self._ahead is not None:
            return partial(self._ahead.takers, self._writers, names, count)
        if shares is None and count == len(names):
            return partial(self._writers.ids, names)
        if shares is None:
            shares = getattr(self._batch, "extend_lens", None)
        if shares is None or len(shares) != len(names) or sum(shares) != count:
            return -1
        return partial(self._writers.repeated, names, list(shares))


class _Ahead:
    """How many slots each request of a batch gets when it is prepared to draft ahead. SGLang tells only after it took
    them all at once; the core asks who got them later still, when the event takes effect."""

    def __init__(self, batch: Any) -> None:
        self._requests = tuple(batch.reqs)
        self._before = [schedulers.allocated_tokens(request) for request in self._requests]
        self._shares: list[int] = []

    def prepared(self) -> None:
        """The batch was prepared."""
        after = [schedulers.allocated_tokens(request) for request in self._requests]
        self._shares = [end - begin for begin, end in zip(self._before, after, strict=True)]

    def takers(self, writers: RequestWriters, names: Sequence[str], count: int) -> int | Tensor:
        """Writer ids of ``count`` slots, -1 if the requests' lengths don't tell."""
        return writers.repeated(names, self._shares) if sum(self._shares) == count else -1


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
        self._look()

    def intact(self) -> bool:
        """Whether the list is still what our last look at it left."""
        allocator = self._allocator
        released = allocators.released_pages(allocator)
        return allocators.free_pages(allocator) is self._free and self._same(released)

    def called(self, name: str, owners: Owners, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tells what the function ``name`` of the allocator, which has just run with these arguments, did to the list.
        False where it did what a function of this name doesn't do."""
        freed = name not in allocators.ALLOCS and name not in (allocators.CLEAR, allocators.MERGE)
        if freed:
            return self._taken_back(name, owners, args[0] if args else next(iter(kwargs.values()), None))
        self._tell()
        if name == allocators.CLEAR:
            self._cleared()
        elif name == allocators.MERGE:
            self._look()
        else:
            return self._handed_out(owners, allocators.page_shares(name, self._allocator, args, kwargs))
        return True

    def _look(self) -> None:
        self._free: Tensor = allocators.free_pages(self._allocator)
        self._released = tuple(allocators.released_pages(self._allocator))

    def _cleared(self) -> None:
        self._waiting.clear()
        self._look()
        for name in self.regions:
            region = self._canary.regions[name]
            self._canary.clear_slots(name, torch.arange(region.slots, device=region.device))

    def _handed_out(self, owners: Owners, shares: Sequence[int] | None) -> bool:
        before = self._free
        self._look()
        count = len(before) - len(self._free)
        if count > 0:
            # States are taken ahead for whoever waits, so nothing says who gets them.
            taker = -1 if allocators.hands_out_states(self._allocator) else owners.taker(count, shares)
            for region, page_slots in self.regions.items():
                self._canary.alloc_slots(region, before[:count], taker, page_slots)
        return count >= 0

    def _same(self, released: Sequence[Tensor]) -> bool:
        return len(released) == len(self._released) and all(map(operator.is_, released, self._released))

    def _taken_back(self, name: str, owners: Owners, pages: Any) -> bool:
        free, released = self._free, self._released
        now_free, now_released = allocators.free_pages(self._allocator), allocators.released_pages(self._allocator)
        at_end = self._appends and name != allocators.RESTORE
        grown_free, run = len(now_free) - len(free), self._run
        in_run = run is not None and run.place == ("free", at_end) and not self._waiting
        if run is not None and in_run and grown_free > 0 and self._same(now_released):
            # The next request of many that end: there is nothing more to find out.
            self._free = now_free
            run.grow(now_free, grown_free, ((owners.freer(), grown_free),))
            return True
        back = {("free", at_end): grown_free}
        staged: Sequence[Tensor] = ()
        if len(now_released) == len(released) == 1:
            back["released", at_end] = len(now_released[0]) - len(released[0])
        else:
            staged = now_released[len(released) :]
            back["staged", True] = sum(len(part) for part in staged)
        sound = len(now_released) >= len(released) and min(back.values()) >= 0
        grown = {place: count for place, count in back.items() if count > 0}
        if not grown and isinstance(pages, Tensor) and len(pages):
            self._waiting.setdefault(name, []).append((owners.freer(), self._count(name, pages)))
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
                self._run = _Run(place)
                self._canary.tell_later(self._tell)
            self._run.grow(now_free, count, shares, staged if place[0] == "staged" else ())
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
            self._canary.free_slots(region, pages, owner, page_slots, run.ready())


class _Run:
    """Pages that came back in a row to one end of a list: a batch of requests that end gives them back one by one. They
    are told as one event, of the list as it is in the end: views of those that SGLang replaced meanwhile would keep
    their memory, megabytes each.

    ``place``: ``free``, ``released`` or ``staged``, and whether pages are appended to it."""

    def __init__(self, place: tuple[str, bool]) -> None:
        self.place = place
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._count = 0
        self._parts: list[Tensor] = []
        self._shares: list[list[tuple[int, int]]] = []

    def grow(self, free: Tensor, count: int, shares: Sequence[tuple[int, int]], parts: Sequence[Tensor] = ()) -> None:
        """``count`` more pages on the current stream of the device of ``free``; ``parts``: themselves, where no list
        holds them. ``shares``: whose they are, and how many of each, -1 if that isn't known."""
        if free.is_cuda:
            self._streams[current_handle(free.device)] = current(free.device)
        self._count += count
        self._parts += parts
        counts = [share for _, share in shares]
        if counts != [count] and (min(counts) < 0 or sum(counts) != count):
            writers = {writer for writer, _ in shares}
            shares = [(writers.pop() if len(writers) == 1 else -1, count)]
        self._shares.append(list(shares))

    def ready(self) -> list[torch.cuda.Event]:
        """After which `pages` are there: what the streams have to do on which they came back."""
        return [stream.record_event() for stream in self._streams.values()]

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


class Guarded(Protocol):
    """What the hooks need of a `Session`."""

    canary: Canary
    lifetime: Lifetime | None


def allocator_hooks(session: Callable[[], Guarded | None]) -> dict[str, Callable[..., Any]]:
    """Functions of SGLang that change an allocator's list, or say for whom, and what goes around each of them.
    ``session``: the one whose allocator is followed, at that moment. Imports the engine."""

    def lifetime() -> Lifetime | None:
        guarded = session()
        return guarded.lifetime if guarded is not None and guarded.canary.enabled else None

    def changing(name: str, original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
        followed = lifetime()
        if followed is None:
            return original(allocator, *args, **kwargs)
        return followed.call(name, original, allocator, *args, **kwargs)

    def preparing(decode: bool, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        followed = lifetime()
        with followed.owners.preparing(batch, decode) if followed else nullcontext():
            return original(batch, *args, **kwargs)

    def releasing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        followed, request = lifetime(), args[0] if args else kwargs.get("req")
        with followed.owners.releasing(request) if followed and request is not None else nullcontext():
            return original(*args, **kwargs)

    functions = allocators.allocator_functions()
    return {
        **{target: partial(changing, target.rpartition(".")[2]) for target in functions},
        **{target: partial(preparing, target == targets.DECODES) for target in targets.existing(targets.PREPARES)},
        **dict.fromkeys(targets.existing(targets.RELEASES), releasing),
    }


def _page_slots(allocator: Any, region: Region) -> int:
    """Slots of ``region`` in a page of the allocator, 0 where pages and slots don't go together."""
    slots, rest = divmod(allocators.page_tokens(allocator), region.tokens_per_slot)
    return 0 if rest else slots
