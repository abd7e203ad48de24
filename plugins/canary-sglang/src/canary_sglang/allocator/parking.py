"""`Parking`: which cached slots no request has, by the locks of the prefix cache."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from canary_core import Canary, StreamSet
from canary_sglang.allocator.owners import Owners
from canary_sglang.compat import caches
from canary_sglang.compat.cache_locks import CacheCall, CacheLocks, LockedNode

Change = Literal["park", "share"]


class Parking:
    """Tells Canary when the last lock of a node goes, or a node is inserted that nobody has locked: its slots are
    parked; and when somebody locks it again: they are shared. What the cache evicts it gives to its allocator, whose
    `Follower` asks `evicting`.

    A node's changes take turns. So of those between two events only the last one counts, if there is an odd number of
    them. All that are parked are told as one event, and all that are shared as another: when a batch of requests begins
    or ends, the engine waits for its host. Nothing is read from the device.

    ``locks``: of the cache that is followed. ``regions``: those whose slots are numbered as the cache's. ``owners``:
    say which request lets go of its slots now. ``lost``: called with the reason when it can't be said any more which
    slots are parked; none is then, and nothing more must be told here.
    """

    def __init__(
        self,
        canary: Canary,
        locks: CacheLocks,
        regions: Sequence[str],
        owners: Owners,
        lost: Callable[[str], None],
    ) -> None:
        self._canary = canary
        # Kept, since a batch that begins or ends makes hundreds of calls while the engine waits for its host.
        self._guard = canary.guard("parking")
        self._lost = lost
        self._locks = locks
        self._regions = tuple(regions)
        self._owners = owners
        self._streams = StreamSet(canary.device)
        self._changed: dict[int, tuple[Change, int, LockedNode]] = {}
        self.evicting = False

    @property
    def cache(self) -> Any:
        """The cache that is followed."""
        return self._locks.cache

    def call(self, call: CacheCall, original: Callable[..., Any]) -> Any:
        """Calls ``original``, a function of `targets.PARKING`, and notes what it did."""
        locks, cache = self._locks, self._locks.cache
        with self._guard:
            if call.change == "evict":
                self._tell()
            locks.before(call)
            if locks.doubt:
                self._give_up()
        if locks.doubt:
            return original(cache, *call.args, **call.kwargs)
        before, self.evicting = self.evicting, self.evicting or call.change == "evict"
        try:
            result = original(cache, *call.args, **call.kwargs)
        finally:
            self.evicting = before
        with self._guard:
            nodes = locks.after(call, result)
            if nodes:
                self._note("share" if call.change == "lock" else "park", nodes)
            if locks.doubt:
                self._give_up()
        return result

    def cleared(self) -> None:
        """The cache and its allocator were emptied: no slot is parked."""
        self._changed.clear()
        self._locks.cleared()

    def _give_up(self) -> None:
        """It is not known any more what is locked: nothing is parked from now on."""
        self._tell()
        cached = caches.cached_slots(self._locks.cache)
        if cached is not None:
            for region in self._regions:
                self._canary.slots.share(region, cached)
        self._lost(self._locks.doubt)

    def _note(self, change: Change, nodes: Sequence[LockedNode]) -> None:
        for node in nodes:
            known = self._changed.get(node.key)
            if known is not None and known[2].slots.numel() != node.slots.numel():
                # It was split, and has not all the slots any more that its last change, not yet told, was about.
                self._tell()
        changed = self._changed
        if not changed:
            self._canary.slots.defer(self._tell)
        self._streams.add()
        writer = self._owners.freer() if change == "park" else -1
        for node in nodes:
            if changed.pop(node.key, None) is None:
                changed[node.key] = change, writer, node

    def _tell(self) -> None:
        changed, self._changed = self._changed, {}
        if not changed:
            return
        streams, self._streams = self._streams, StreamSet(self._canary.device)
        # A slot that is in two nodes, one of which was split meanwhile, was parked first: a node is not let go of
        # before those below it.
        for change in ("park", "share"):
            nodes = [node for of, _, node in changed.values() if of == change]
            writers = [writer for of, writer, _ in changed.values() if of == change]
            if len(nodes) > 1 and streams.only_current():
                slots = torch.cat([node.slots for node in nodes])
                owner = self._owners.each(writers, [len(node.slots) for node in nodes])
                for region in self._regions:
                    getattr(self._canary.slots, change)(region, slots, owner)
            else:
                ready = streams.ready()
                for node, writer in zip(nodes, writers, strict=True):
                    for region in self._regions:
                        getattr(self._canary.slots, change)(region, node.slots, writer, 1, ready)
