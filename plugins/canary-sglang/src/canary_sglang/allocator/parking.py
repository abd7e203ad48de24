"""`Parking`: which cached slots no request has, by the locks of a `RadixCache`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from canary_core import Canary, StreamSet
from canary_sglang.compat import caches, targets

Change = Literal["park", "share"]


class Parking:
    """Tells Canary when the last lock of a node goes, or a node is inserted that nobody has locked: its slots are
    parked; and when somebody locks it again: they are shared. What the cache evicts it gives to its allocator, whose
    `Follower` asks `evicting`.

    A node's changes take turns. So of those between two events only the last one counts, if there is an odd number of
    them. They are told as one event each, on no stream in particular, and nothing is read from the device.

    ``regions``: those whose slots are numbered as the cache's. ``releasing``: writer id of the request that lets go of
    its slots now, -1 if unknown.
    """

    def __init__(self, canary: Canary, regions: Sequence[str], releasing: Callable[[], int]) -> None:
        self._canary = canary
        self._regions = tuple(regions)
        self._releasing = releasing
        self._streams = StreamSet(canary.device)
        # By the id of the node, which is kept alive here.
        self._changed: dict[int, tuple[Change, int, Any, Any]] = {}
        self._sure = True
        self.evicting = False

    def call(self, target: str, original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a function of `targets.PARKING`, and notes what it did."""
        if not self._sure:
            return original(cache, *args, **kwargs)
        if target == targets.EVICT:
            self.evicting = True
            try:
                return original(cache, *args, **kwargs)
            finally:
                self.evicting = False
        nodes: Sequence[Any] | None = ()
        with self._canary.guard("parking"):
            if target == targets.SPLIT:
                # The node goes on with a part of its slots only.
                self._tell()
            elif target != targets.INSERT:
                node = args[0] if args else kwargs["node"]
                nodes = caches.nodes_locked(cache, node, 0 if target == targets.LOCK else 1)
        result = original(cache, *args, **kwargs)
        with self._canary.guard("parking"):
            if target == targets.INSERT:
                nodes = caches.inserted(result, args[1] if len(args) > 1 else kwargs["key"])
            # Nothing is locked before something was inserted, so nothing was told yet.
            self._sure = nodes is not None
            if nodes:
                self._note("share" if target == targets.LOCK else "park", nodes)
        return result

    def _note(self, change: Change, nodes: Sequence[Any]) -> None:
        if not self._changed:
            self._canary.slots.defer(self._tell)
        self._streams.add()
        writer = self._releasing() if change == "park" else -1
        for node in nodes:
            if self._changed.pop(id(node), None) is None:
                self._changed[id(node)] = change, writer, node, node.value

    def _tell(self) -> None:
        changed, self._changed = self._changed, {}
        if not changed:
            return
        ready, self._streams = self._streams.ready(), StreamSet(self._canary.device)
        # Those alike in a row become one launch.
        for change, writer, _, value in sorted(changed.values(), key=lambda each: each[:2]):
            for region in self._regions:
                getattr(self._canary.slots, change)(region, value, writer, 1, ready)
