"""`Parking`: cached slots without a request, by the locks of the prefix cache."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from canary_core import Canary, StreamSet
from canary_sglang.allocator.owners import Owners
from canary_sglang.compat import caches
from canary_sglang.compat.cache_locks import CacheLocks
from canary_sglang.compat.targets import CacheChange


class Parking:
    """Reports parked slots when the last lock of a node goes, or a node is inserted without a lock; and shared ones at
    the next lock. Evicted slots go to the cache's allocator, whose `Follower` asks `evicting`.

    The calls between two events are summed up before the second one: all parked slots as one event, and all shared ones
    as another. When a batch of requests begins or ends, the engine waits for its host. Nothing is read from the device.

    ``locks``: of the followed cache. ``regions``: those with slots numbered as the cache's. ``owners``: the request
    that lets go of its slots now. ``lost``: called with the reason when parked slots can't be told any more; none is
    parked then, and nothing more must be reported here.
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
        self._lost = lost
        self._locks = locks
        locks.freer = owners.freer
        self.cache = locks.cache
        """The followed cache."""
        self._regions = tuple(regions)
        self._owners = owners
        self._streams = StreamSet(canary.device)
        self._noted = False
        self.evicting = False

    def call(
        self, change: CacheChange, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls ``original``, a function of `targets.PARKING`, and notes its effect."""
        locks = self._locks
        # Not `Canary.guard`, a context of which each costs two calls: a batch that begins or ends calls this hundreds
        # of times while the engine waits for its host.
        try:
            if change == "evict":
                self._tell()
            locks.before()
            if locks.doubt:
                self._give_up()
        except Exception as error:
            self._canary.fail("parking", error)
        if locks.doubt:
            return original(self.cache, *args, **kwargs)
        run = original if change != "evict" else partial(self._evict, original)
        result = run(self.cache, *args, **kwargs)
        try:
            if locks.after(change, args, kwargs, result):
                self._streams.add()
                if not self._noted:
                    self._noted = True
                    self._canary.slots.defer(self._tell)
            if locks.doubt:
                self._give_up()
        except Exception as error:
            self._canary.fail("parking", error)
        return result

    def cleared(self) -> None:
        """The cache and its allocator were emptied: no slot is parked."""
        self._locks.cleared()

    def _evict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self.evicting = self.evicting, True
        try:
            return original(*args, **kwargs)
        finally:
            self.evicting = before

    def _give_up(self) -> None:
        """The locks are unknown from now on: nothing is parked."""
        self._tell()
        cached = caches.cached_slots(self.cache)
        if cached is not None:
            for region in self._regions:
                self._canary.slots.share(region, cached)
        self._lost(self._locks.doubt)

    def _tell(self) -> None:
        if not self._noted:
            return
        self._noted = False
        streams, self._streams = self._streams, StreamSet(self._canary.device)
        slots = self._canary.slots
        for changes in self._locks.changes():
            writers = [writer for writer, _ in changes.parked]
            self._tell_as_one(slots.park, [parked for _, parked in changes.parked], writers, streams)
            self._tell_as_one(slots.share, changes.shared, [-1] * len(changes.shared), streams)

    def _tell_as_one(
        self, tell: Callable[..., None], nodes: Sequence[Tensor], writers: Sequence[int], streams: StreamSet
    ) -> None:
        """One event for all ``nodes``, if they can be joined on the current stream."""
        if len(nodes) > 1 and streams.only_current():
            joined, owner = torch.cat(list(nodes)), self._owners.each(writers, [slots.numel() for slots in nodes])
            for region in self._regions:
                tell(region, joined, owner)
        elif nodes:
            ready = streams.ready()
            for slots, writer in zip(nodes, writers, strict=True):
                for region in self._regions:
                    tell(region, slots, writer, 1, ready)
