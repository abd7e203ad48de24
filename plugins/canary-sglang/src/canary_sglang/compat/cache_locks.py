"""Locks of a prefix cache: the nodes locked or unlocked by a call of the cache.

| cache                                                           | source                                            |
|-----------------------------------------------------------------|---------------------------------------------------|
| `RadixCache`, the usual one up to 0.5.18                        | its nodes count their locks                       |
| `UnifiedRadixCache`, the usual one from 0.5.19 on, with no      | number of its unlocked tokens before and after a  |
| component but the full one, and its core in Python or in Rust   | call, and the nodes above another                 |

Caches are recognised by the exact names of their classes, since a subclass may hold slots without a lock. Nothing here
waits for the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from canary_sglang.compat import caches, targets

Args = Sequence[Any]
Kwargs = Mapping[str, Any]

OFF = frozenset({"ChunkCache", "SWAChunkCache", "PureSWAChunkCache"})
"""Classes of caches without any content."""


class Changes(NamedTuple):
    """Slots without a holder any more, each with the writer id of the last one, and such slots held again: int64
    ``[tokens]`` of a node each, whose numbers never change."""

    parked: list[tuple[int, Tensor]]
    shared: list[Tensor]


class CacheLocks(ABC):
    """Nodes locked and unlocked by the calls of one cache. Each call of a function of `targets.PARKING` is reported
    before it runs, and after: the sort of change, and the arguments without the cache. A batch of requests that begins
    or ends makes hundreds of calls while the engine waits for its host, so they are only noted; `changes` works out
    their effect, once for all."""

    doubt = ""
    """Why the locked nodes are unknown; empty while they are known."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.freer: Callable[[], int] = lambda: -1
        """Returns the writer id of the request letting go of nodes now, -1 for nobody."""

    @abstractmethod
    def before(self) -> None:
        """A call is about to run."""

    @abstractmethod
    def after(self, change: targets.CacheChange, args: Args, kwargs: Kwargs, result: Any) -> bool:
        """A call has run, with ``result``. Returns whether `changes` may have something to report. False, too, if the
        locks are unknown from now on; `doubt` has the reason."""

    @abstractmethod
    def changes(self) -> Sequence[Changes]:
        """Changes since the last call, to be reported one after the other. To be asked before the cache evicts."""

    @abstractmethod
    def cleared(self) -> None:
        """The cache and its allocator were emptied."""


class _RadixNode(Protocol):
    lock_ref: int
    value: Tensor
    parent: Any


NOT_CALLED = (0, -1)


class RadixLocks(CacheLocks):
    """Locks of a `RadixCache`. Each lock is of a node and all nodes above. So a node's number of locks before the noted
    calls is the present one, less the calls about the node and the nodes below."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        # Locks less unlocks, and the writer of the last unlock, in the order of the last calls.
        self._called: dict[_RadixNode, tuple[int, int]] = {}
        # Nodes that were inserted, so that a request had their slots before, and its writer.
        self._made: dict[_RadixNode, int] = {}

    def before(self) -> None:
        """See `CacheLocks`."""

    def after(self, change: targets.CacheChange, args: Args, kwargs: Kwargs, result: Any) -> bool:
        """See `CacheLocks`."""
        if change == "lock" or change == "unlock":
            node = args[0] if args else kwargs["node"]
            count, writer = self._called.pop(node, NOT_CALLED)
            self._called[node] = (count + 1, writer) if change == "lock" else (count - 1, self.freer())
            return True
        if change == "insert":
            return self._inserted(argument(args, kwargs, 1, "key"), result)
        if change == "split":
            child = argument(args, kwargs, 1, "child")
            if child in self._made:
                self._made[result] = self._made[child]
        return bool(self._called or self._made)

    def changes(self) -> Sequence[Changes]:
        """See `CacheLocks`."""
        called, made = self._called, self._made
        self._called, self._made = {}, {}
        found = dict.fromkeys(made, 0)
        writers = made.copy()
        for below, (count, writer) in called.items():
            node = below
            # The root has no parent, and no lock counts there.
            while node is not None and node.parent is not None:
                found[node] = found.get(node, 0) + count
                writers[node] = writer
                node = node.parent
        changes = Changes([], [])
        for node, count in found.items():
            if node.lock_ref > 0:
                if node.lock_ref <= count and node not in made:
                    changes.shared.append(node.value)
            elif node.lock_ref > count or node in made:
                changes.parked.append((writers[node], node.value))
        return (changes,)

    def cleared(self) -> None:
        """See `CacheLocks`."""
        self._called.clear()
        self._made.clear()

    def _inserted(self, key: Any, result: Any) -> bool:
        if not isinstance(result, tuple):
            self.doubt = "in this release its insertions do not say what they have made"
            return False
        known, node = result
        if known == len(key) or node.lock_ref:
            return False
        self._made[node] = self.freer()
        return True


class UnifiedLocks(CacheLocks):
    """Locks of a `UnifiedRadixCache`.

    Its core counts the tokens of all unlocked nodes. Each lock is of a node and all nodes above. So a lock or an unlock
    changes the lowest nodes of the path, as many as shown by the count. An insertion makes one node, the lowest one. A
    count that changed between two calls means another source of locks or unlocks.

    A node's changes take turns. So of those between two events only the last one counts, if there is an odd number of
    them.
    """

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self._core = cache.tree_core
        self._full = next(kind for kind in cache.tree_components if kind.name == "FULL")
        # It is followed from its first call on, when it has nothing.
        self._unlocked = 0
        # The last change of each node: whether it is parked, who has let go of it, and its slots.
        self._changed: dict[int, tuple[bool, int, Tensor]] = {}
        self._earlier: list[Changes] = []

    def before(self) -> None:
        """See `CacheLocks`."""
        changed = self._core.full_evictable_size() - self._unlocked
        if changed:
            self.doubt = f"something else than its known functions has changed its unlocked tokens by {changed:+}"

    def after(self, change: targets.CacheChange, args: Args, kwargs: Kwargs, result: Any) -> bool:
        """See `CacheLocks`."""
        now = self._core.full_evictable_size()
        changed, self._unlocked = now - self._unlocked, now
        if not changed or change == "evict":
            return False
        if (changed < 0) is not (change == "lock"):
            self.doubt = f"a call to {change} has changed its unlocked tokens by {changed:+}"
            return False
        node = result.last_device_node if change == "insert" else argument(args, kwargs, 0, "node_id", "node")
        found = self._lowest(node, abs(changed))
        if found is None or (change == "insert" and len(found) != 1):
            self.doubt = f"no nodes from {node} upwards have the {abs(changed)} tokens that a call to {change} changed"
            return False
        self._note(change != "lock", found, -1 if change == "lock" else self.freer())
        return True

    def changes(self) -> Sequence[Changes]:
        """See `CacheLocks`."""
        self._round()
        told, self._earlier = self._earlier, []
        return told

    def cleared(self) -> None:
        """See `CacheLocks`."""
        self._unlocked = 0
        self._changed.clear()
        self._earlier.clear()

    def _note(self, parks: bool, nodes: Sequence[tuple[int, Tensor]], writer: int) -> None:
        for key, slots in nodes:
            known = self._changed.get(key)
            if known is not None and known[2].numel() != slots.numel():
                # It was split, and has not all the slots any more that its last change was about.
                self._round()
        changed = self._changed
        for key, slots in nodes:
            if changed.pop(key, None) is None:
                changed[key] = parks, writer, slots

    def _round(self) -> None:
        """Reports noted changes before new ones."""
        changed, self._changed = self._changed.values(), {}
        # A slot that is in two nodes, one of which was split meanwhile, was parked first: a node is not let go of
        # before those below it.
        parked = [(writer, slots) for parks, writer, slots in changed if parks]
        self._earlier.append(Changes(parked, [slots for parks, _, slots in changed if not parks]))

    def _lowest(self, node: int, tokens: int) -> Sequence[tuple[int, Tensor]] | None:
        """``node`` and those above with ``tokens`` together, with their slots."""
        found = []
        core = self._core
        while not core.is_root(node):
            slots = core.get_component_device_value(node, self._full)
            if slots is None:
                return None
            found.append((node, slots))
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


def argument(args: Args, kwargs: Kwargs, index: int, *names: str) -> Any:
    """The argument at ``index`` of a call, or by one of ``names``."""
    return args[index] if len(args) > index else next(kwargs[name] for name in names if name in kwargs)


def locks_of(cache: Any, allocator: Any) -> CacheLocks | str:
    """The locks of ``cache``, which must take its slots from ``allocator``, or the reason why slots without a request
    can't be derived from them."""
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
    """Whether the cache has no slots to park: SGLang without a prefix cache."""
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
    return caches.missing_in(core, needed)
