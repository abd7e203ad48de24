"""What the locks of a prefix cache say: which of its nodes a call of the cache has locked or unlocked.

| cache                                                           | how it is told                                    |
|-----------------------------------------------------------------|---------------------------------------------------|
| `RadixCache`, the usual one up to 0.5.18                        | its nodes count their locks                       |
| `UnifiedRadixCache`, the usual one from 0.5.19 on, with no      | how many of its tokens are not locked, before and |
| component but the full one, and its core in Python or in Rust   | after a call, and which nodes are above another   |

Caches are recognised by the exact names of their classes, since a subclass may hold slots without a lock. Nothing here
waits for the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from canary_sglang.compat import targets

OFF = frozenset({"ChunkCache", "SWAChunkCache", "PureSWAChunkCache"})
"""Classes of caches that keep nothing."""


class LockedNode(NamedTuple):
    """A node of a cache: a key that no other node has while ``node`` is alive, and its slots, int64 ``[tokens]``, whose
    numbers never change."""

    key: int
    node: Any
    slots: Tensor


Nodes = Sequence[LockedNode] | None
"""None: which nodes they are is not known."""


class CacheCall(NamedTuple):
    """A call of a function of `targets.PARKING`: what sort of change it makes, and its arguments without the cache."""

    change: targets.CacheChange
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def argument(self, index: int, *names: str) -> Any:
        """The argument at ``index``, which is called one of ``names``."""
        return self.args[index] if len(self.args) > index else next(self.kwargs[n] for n in names if n in self.kwargs)


class CacheLocks(ABC):
    """Which nodes the calls of one cache lock and unlock. Each call is told before it runs, and after."""

    doubt = ""
    """Why it is not known any more which nodes are locked; empty while it is."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @abstractmethod
    def before(self, call: CacheCall) -> None:
        """``call`` is about to run."""

    @abstractmethod
    def after(self, call: CacheCall, result: Any) -> Nodes:
        """``call`` has run, with this result. Gives the nodes that it has locked first, has let go of as the last one,
        or has made, which nobody has locked yet. None if that is not known any more; `doubt` says why."""

    @abstractmethod
    def cleared(self) -> None:
        """The cache and its allocator were emptied."""


class _RadixNode(Protocol):
    lock_ref: int
    value: Tensor
    parent: Any


class RadixLocks(CacheLocks):
    """Those of a `RadixCache`."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self._found: Sequence[LockedNode] = ()

    def before(self, call: CacheCall) -> None:
        """See `CacheLocks`."""
        if call.change in ("lock", "unlock"):
            self._found = self._locked(call.argument(0, "node"), 0 if call.change == "lock" else 1)

    def after(self, call: CacheCall, result: Any) -> Nodes:
        """See `CacheLocks`."""
        if call.change != "insert":
            found, self._found = self._found, ()
            return found
        if not isinstance(result, tuple):
            self.doubt = "in this release its insertions do not say what they have made"
            return None
        known, node = result
        return [_radix_node(node)] if known < len(call.argument(1, "key")) and node.lock_ref == 0 else []

    def cleared(self) -> None:
        """See `CacheLocks`."""

    def _locked(self, node: _RadixNode | None, times: int) -> list[LockedNode]:
        """The nodes from ``node`` up to the root that are locked so many times. Locks are never fewer towards the root,
        so it goes up no further than there."""
        found = []
        while node is not None and node is not self.cache.root_node and node.lock_ref <= times:
            if node.lock_ref == times:
                found.append(_radix_node(node))
            node = node.parent
        return found


class UnifiedLocks(CacheLocks):
    """Those of a `UnifiedRadixCache`.

    Its core counts the tokens of all nodes that nobody has locked. Each lock is of a node and all nodes above it. So
    what a lock or an unlock changes are the lowest nodes of that path, and the count says how many. An insertion makes
    one node, the lowest one. A count that changed between two calls means that something else has locked or unlocked.
    """

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self._core = cache.tree_core
        self._full = next(kind for kind in cache.tree_components if kind.name == "FULL")
        # It is followed from its first call on, when it has nothing.
        self._unlocked = 0

    def before(self, call: CacheCall) -> None:
        """See `CacheLocks`."""
        changed = int(self._core.full_evictable_size()) - self._unlocked
        if changed:
            self.doubt = f"something else than its known functions has changed its unlocked tokens by {changed:+}"

    def after(self, call: CacheCall, result: Any) -> Nodes:
        """See `CacheLocks`."""
        now = int(self._core.full_evictable_size())
        changed, self._unlocked = now - self._unlocked, now
        if not changed or call.change == "evict":
            return ()
        if (changed < 0) is not (call.change == "lock"):
            self.doubt = f"a call to {call.change} has changed its unlocked tokens by {changed:+}"
            return None
        node = result.last_device_node if call.change == "insert" else call.argument(0, "node_id", "node")
        found = self._lowest(node, abs(changed))
        if found is None or (call.change == "insert" and len(found) != 1):
            self.doubt = (
                f"no nodes from {node} upwards have the {abs(changed)} tokens that a call to {call.change} changed"
            )
            return None
        return found

    def cleared(self) -> None:
        """See `CacheLocks`."""
        self._unlocked = 0

    def _lowest(self, node: int, tokens: int) -> Nodes:
        """``node`` and those above it that have ``tokens`` together."""
        found = []
        core = self._core
        while not core.is_root(node):
            slots = core.get_component_device_value(node, self._full)
            if slots is None:
                return None
            found.append(LockedNode(node, None, slots))
            count = slots.numel()
            tokens -= count
            if tokens <= 0:
                return None if tokens else found
            # The only function that both cores have for the parent of a node. It is meant for HiCache, and only looks.
            place = core.validate_buffer_backup(node, count)
            if place is None:
                return None
            node = place.parent_node_id
        return None


def locks_of(cache: Any, allocator: Any) -> CacheLocks | str:
    """The locks of ``cache``, which must take its slots from ``allocator``, or the reason why they do not say which of
    its slots no request holds."""
    kind = type(cache).__name__
    if kind not in ("RadixCache", "UnifiedRadixCache"):
        return f"{kind} is no prefix cache whose locks this canary-sglang follows"
    if cache.token_to_kv_pool_allocator is not allocator:
        return f"the {kind} takes its slots from an allocator that is not followed"
    if kind == "RadixCache":
        return "keys of bigrams are not followed" if getattr(cache, "is_eagle", False) else RadixLocks(cache)
    refusal = _unified_refusal(cache)
    return UnifiedLocks(cache) if refusal is None else refusal


def keeps_nothing(cache: Any) -> bool:
    """Whether it has no slots that could be parked: SGLang without a prefix cache."""
    return type(cache).__name__ in OFF or bool(getattr(cache, "disable", False))


def _unified_refusal(cache: Any) -> str | None:
    core = cache.tree_core
    kinds = [kind.name for kind in cache.tree_components]
    if kinds != ["FULL"]:
        return f"a UnifiedRadixCache of {', '.join(kinds)}: what a window or states let go of has locks of its own"
    if type(core).__name__ not in ("UnifiedTreeCore", "RustUnifiedTreeCore"):
        return f"a UnifiedRadixCache with {type(core).__name__}, which is not known"
    if getattr(core, "is_eagle", False):
        return "keys of bigrams are not followed"
    for name in ("cache_controller", "linker", "enable_session_radix_cache"):
        if getattr(cache, name, None):
            return f"a UnifiedRadixCache with {name}, which holds slots in other ways"
    needed = ("full_evictable_size", "is_root", "get_component_device_value", "validate_buffer_backup")
    missing = [name for name in needed if not hasattr(core, name)]
    return f"the UnifiedRadixCache of this release has no {', '.join(missing)}" if missing else None


def _radix_node(node: _RadixNode) -> LockedNode:
    return LockedNode(id(node), node, node.value)
