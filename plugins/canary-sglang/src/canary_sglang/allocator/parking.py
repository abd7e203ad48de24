"""`Parking`: which cached slots no request has, by the locks of the prefix cache."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from canary_core import Canary, StreamSet
from canary_sglang.compat import caches
from canary_sglang.compat.cache_locks import CacheCall, CacheLocks, LockedNode

Change = Literal["park", "share"]


class Parking:
    """Tells Canary when the last lock of a node goes, or a node is inserted that nobody has locked: its slots are
    parked; and when somebody locks it again: they are shared. What the cache evicts it gives to its allocator, whose
    `Follower` asks `evicting`.

    A node's changes take turns. So of those between two events only the last one counts, if there is an odd number of
    them. They are told as one event each, on no stream in particular, and nothing is read from the device.

    ``locks``: of the cache that is followed. ``regions``: those whose slots are numbered as the cache's.
    ``releasing``: writer id of the request that lets go of its slots now, -1 if unknown. ``lost``: called with the
    reason when it can't be said any more which slots are parked; none is then, and nothing more must be told here.
    """

    def __init__(
        self,
        canary: Canary,
        locks: CacheLocks,
        regions: Sequence[str],
        releasing: Callable[[], int],
        lost: Callable[[str], None],
    ) -> None:
        self._canary = canary
        self._lost = lost
        self._locks = locks
        self._regions = tuple(regions)
        self._releasing = releasing
        self._streams = StreamSet(canary.device)
        self._changed: dict[int, tuple[Change, int, LockedNode]] = {}
        self.evicting = False

    @property
    def cache(self) -> Any:
        """The cache that is followed."""
        return self._locks.cache

    def call(self, call: CacheCall, run: Callable[[], Any]) -> Any:
        """Runs a function of `targets.PARKING`, and notes what it did."""
        with self._canary.guard("parking"):
            if call.change in ("split", "evict"):
                # A node goes on with a part of its slots only, or none.
                self._tell()
            self._locks.before(call)
            self._ask()
        if self._locks.doubt:
            return run()
        if call.change != "evict":
            result = run()
        else:
            before, self.evicting = self.evicting, True
            try:
                result = run()
            finally:
                self.evicting = before
        with self._canary.guard("parking"):
            nodes = self._locks.after(call, result)
            if nodes:
                self._note("share" if call.change == "lock" else "park", nodes)
            self._ask()
        return result

    def cleared(self) -> None:
        """The cache and its allocator were emptied: no slot is parked."""
        self._changed.clear()
        self._locks.cleared()

    def _ask(self) -> None:
        """Whether it is still known what is locked; if not, nothing is parked any more."""
        if not self._locks.doubt:
            return
        self._tell()
        cached = caches.cached_slots(self._locks.cache)
        if cached is not None:
            for region in self._regions:
                self._canary.slots.share(region, cached)
        self._lost(self._locks.doubt)

    def _note(self, change: Change, nodes: Sequence[LockedNode]) -> None:
        if any(self._was_split(node) for node in nodes):
            self._tell()
        if not self._changed:
            self._canary.slots.defer(self._tell)
        self._streams.add()
        writer = self._releasing() if change == "park" else -1
        for node in nodes:
            if self._changed.pop(node.key, None) is None:
                self._changed[node.key] = change, writer, node

    def _was_split(self, node: LockedNode) -> bool:
        """Whether it has not all the slots any more that its last change, not yet told, was about."""
        known = self._changed.get(node.key)
        return known is not None and len(known[2].slots) != len(node.slots)

    def _tell(self) -> None:
        changed, self._changed = self._changed, {}
        if not changed:
            return
        ready, self._streams = self._streams.ready(), StreamSet(self._canary.device)
        # Those alike in a row become one launch. A slot that is in two of them, of a node that was split meanwhile, was
        # parked first: a node is not let go of before those below it.
        for change, writer, node in sorted(changed.values(), key=lambda each: each[:2]):
            for region in self._regions:
                getattr(self._canary.slots, change)(region, node.slots, writer, 1, ready)
