"""SGLang's prefix caches as nodes. Only this module, `walk` (``id``, ``key``, ``parent``, ``children``) and, for
eviction, `compat/caches.py` use the attributes of nodes.

| class                                      | releases                  | how it is walked                           |
|--------------------------------------------|---------------------------|--------------------------------------------|
| `RadixCache`                               | the usual one to 0.5.20   | node by node                               |
| `HiRadixCache`                             | with HiCache to 0.5.20    | node by node, also those in host memory    |
| `SWARadixCache`                            | to 0.5.20                 | node by node                               |
| `UnifiedRadixCache`, `UnifiedTreeCore`     | from 0.5.16               | node by node; with HiCache as above        |
| `UnifiedRadixCache`, `RustUnifiedTreeCore` | the usual one from 0.5.21 | at once, by its own `walk_for_kv_canary`,  |
|                                            |                           | which gives no nodes, no tokens, no locks  |
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from canary_core import CachedRun
from canary_sglang.batches.tokens import as_array, folded

FULL, WINDOW = "full", "swa"
"""The components of a node, each with its own locks and sizes; also the names of their regions."""

PASSED = frozenset({WINDOW})
"""`CachedRun.absent` of tokens passed by the window."""
OFF = "the radix cache is off"

Sizes = dict[str, tuple[int, int]]
"""Evictable and protected tokens, by component."""


@dataclass(frozen=True, slots=True)
class Broken:
    """One contradiction in a cache: node, rule, detail and slot of a `Violation`, and the component."""

    node: int | None
    rule: str
    detail: str
    component: str = FULL
    slot: int | None = None


class NodeTree(ABC):
    """A cache with Python objects as nodes."""

    has_window = False
    has_host = False
    """Whether a node may be in host memory only."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.page_size = int(cache.page_size)

    @property
    @abstractmethod
    def root(self) -> Any:
        """The node of the empty prefix; another object after a flush."""

    @abstractmethod
    def slots(self, node: Any) -> Tensor | None:
        """Slots of the full pool, one for each token; None if the node is not on the device."""

    @abstractmethod
    def locks(self, node: Any) -> Mapping[str, int]:
        """How many requests lock the node, by component."""

    @abstractmethod
    def sizes(self) -> Sizes:
        """Tokens in the cache by its own counts."""

    def window(self, node: Any) -> Tensor | bool | None:
        """The node's slots of the window pool; True for unknown ones; None if the window has passed the node."""
        return None

    def host(self, node: Any) -> Tensor | None:
        """Slots of the full pool's copy in host memory, one for each token; None if it has no copy there."""
        return None

    def holds_window(self, node: Any) -> bool:
        """Whether the node has slots of the window pool."""
        window = self.window(node)
        return window is not None and window is not False

    def child_key(self, key: Any) -> Any:
        """The key under which a parent stores a node with ``key``, of at least a page of tokens."""
        return key.child_key(self.page_size)

    def has(self, parent: Any, child: Any) -> bool:
        """Whether a search from ``parent`` finds ``child``."""
        if parent is None or len(child.key) < self.page_size:
            return False
        return parent.children.get(self.child_key(child.key)) is child

    def check(self, node: Any, is_root: bool) -> list[Broken]:
        """Contradictions in the node and in its links to its children."""
        found = [] if is_root else self._check_node(node)
        locks = {} if is_root else self.locks(node)
        for name, child in node.children.items():
            if child.parent is not node:
                other = getattr(child.parent, "id", None)
                detail = f"node {node.id} has it as a child, but its parent is {_named(other)}"
                found.append(Broken(child.id, "parent", detail))
            if len(child.key) < self.page_size:
                found.append(Broken(child.id, "key", f"its key has {len(child.key)} tokens, a page {self.page_size}"))
            elif self.child_key(child.key) != name:
                detail = f"node {node.id} has it under {name!r}, its key begins with {self.child_key(child.key)!r}"
                found.append(Broken(child.id, "key", detail))
            # A count below zero is a finding of its own, and every child has a higher one.
            if locks and self.locks(child)[FULL] > max(locks[FULL], 0):
                detail = f"{self.locks(child)[FULL]} requests hold it, but only {locks[FULL]} its parent {node.id}"
                found.append(Broken(child.id, "lock_order", detail))
        return found

    def _check_node(self, node: Any) -> list[Broken]:
        found = []
        slots = self.slots(node)
        window = self.window(node)
        if self.has_host:
            found += self._check_tiers(node, slots)
        for name, held in ((FULL, slots), (WINDOW, window)):
            if isinstance(held, Tensor) and len(held) != len(node.key):
                detail = f"its key has {len(node.key)} tokens, and it holds {len(held)} slots"
                found.append(Broken(node.id, "length", detail, name))
        if len(node.key) % self.page_size:
            detail = f"its key has {len(node.key)} tokens, which is not a multiple of the page, {self.page_size}"
            found.append(Broken(node.id, "key", detail))
        if slots is None and self.holds_window(node):
            found.append(Broken(node.id, "window", "it holds slots of the window, and none of the full pool", WINDOW))
        locks = self.locks(node)
        for name, count in locks.items():
            if count < 0:
                found.append(Broken(node.id, "lock_ref", f"its lock count is {count}", name))
            elif count > locks[FULL]:
                detail = f"{count} requests hold its window, and only {locks[FULL]} the node"
                found.append(Broken(node.id, "lock_order", detail, name))
        return found

    def _check_tiers(self, node: Any, slots: Tensor | None) -> list[Broken]:
        """A prefix must not be evicted before its continuation, by the caches' own checks."""
        host, above = self.host(node), node.parent
        details = []
        if host is not None and len(host) != len(node.key):
            details.append(f"its key has {len(node.key)} tokens, and it holds {len(host)} host slots")
        if host is None and slots is None:
            details.append("it holds slots neither on the device nor in host memory")
        if slots is not None and above is not None and above is not self.root and self.slots(above) is None:
            details.append(f"it is on the device, and its parent {above.id} is not")
        return [Broken(node.id, "tier", detail) for detail in details]

    def add(self, sums: Sizes, node: Any) -> None:
        """Adds the node's tokens to ``sums``, counted as in `sizes`."""
        held = {FULL: self.slots(node), WINDOW: self.window(node)}
        for name, count in self.locks(node).items():
            holds = held[name]
            if holds is None or (name == WINDOW and not self.holds_window(node)):
                continue
            tokens = len(holds) if isinstance(holds, Tensor) else len(node.key)
            evictable, protected = sums.get(name, (0, 0))
            sums[name] = (evictable, protected + tokens) if count > 0 else (evictable + tokens, protected)


class Radix(NodeTree):
    """`RadixCache`."""

    @property
    def root(self) -> Any:
        """See `NodeTree`."""
        return self.cache.root_node

    def slots(self, node: Any) -> Tensor | None:
        """See `NodeTree`."""
        value: Tensor | None = node.value
        return value

    def locks(self, node: Any) -> Mapping[str, int]:
        """See `NodeTree`."""
        return {FULL: node.lock_ref}

    def sizes(self) -> Sizes:
        """See `NodeTree`."""
        return {FULL: (int(self.cache.evictable_size_), int(self.cache.protected_size_))}

    def child_key(self, key: Any) -> Any:
        """See `NodeTree`. Before 0.5.16 from a function of the cache."""
        if hasattr(key, "child_key"):
            return key.child_key(self.page_size)
        return self.cache.get_child_key_fn(key)


class HostRadix(Radix):
    """`HiRadixCache`."""

    has_host = True

    def host(self, node: Any) -> Tensor | None:
        """See `NodeTree`."""
        slots: Tensor | None = node.host_value
        return slots


class WindowRadix(Radix):
    """`SWARadixCache`."""

    has_window = True

    def locks(self, node: Any) -> Mapping[str, int]:
        """See `NodeTree`."""
        return {FULL: node.full_lock_ref, WINDOW: node.swa_lock_ref}

    def window(self, node: Any) -> Tensor | bool | None:
        """See `NodeTree`."""
        return None if node.swa_tombstone else True

    def sizes(self) -> Sizes:
        """See `NodeTree`."""
        cache = self.cache
        return {
            FULL: (int(cache.full_evictable_size_), int(cache.full_protected_size_)),
            WINDOW: (int(cache.swa_evictable_size_), int(cache.swa_protected_size_)),
        }


class Unified(NodeTree):
    """`UnifiedRadixCache` with a core in Python."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self._core = cache.tree_core
        by_name = {kind.name: kind for kind in self._core.component_types}
        self._kinds = {name: by_name[key] for name, key in ((FULL, "FULL"), (WINDOW, "SWA")) if key in by_name}
        self.has_window = WINDOW in self._kinds
        self.has_host = getattr(cache, "cache_controller", None) is not None

    @property
    def root(self) -> Any:
        """See `NodeTree`."""
        return self._core.root_node

    def slots(self, node: Any) -> Tensor | None:
        """See `NodeTree`."""
        value: Tensor | None = node.component_data[self._kinds[FULL]].value
        return value

    def locks(self, node: Any) -> Mapping[str, int]:
        """See `NodeTree`."""
        return {name: node.component_data[kind].lock_ref for name, kind in self._kinds.items()}

    def window(self, node: Any) -> Tensor | bool | None:
        """See `NodeTree`."""
        value: Tensor | None = node.component_data[self._kinds[WINDOW]].value if self.has_window else None
        return value

    def host(self, node: Any) -> Tensor | None:
        """See `NodeTree`."""
        slots: Tensor | None = node.component_data[self._kinds[FULL]].host_value if self.has_host else None
        return slots

    def sizes(self) -> Sizes:
        """See `NodeTree`."""
        core = self._core
        return {
            name: (int(core.component_evictable_size_[kind]), int(core.component_protected_size_[kind]))
            for name, kind in self._kinds.items()
        }


class RustTree:
    """`UnifiedRadixCache` with a core in Rust."""

    def __init__(self, cache: Any) -> None:
        self._core = cache.tree_core
        self._has_window = any(kind.name == "SWA" for kind in cache.tree_components)

    def runs(self, device: torch.device) -> list[CachedRun]:
        """All tokens in the cache, with slots on ``device``. Waits for the device."""
        slots, positions, before = self._walk(resident_only=False)
        if not len(slots):
            return []
        resident = torch.ones(len(slots), dtype=torch.bool, device="cpu")
        if self._has_window:
            resident = torch.isin(slots, self._walk(resident_only=True)[0])
        follows = (positions[1:] == positions[:-1] + 1) & (before[1:] == slots[:-1]) & (resident[1:] == resident[:-1])
        begins = [0, *(follows.logical_not().nonzero()[:, 0] + 1).tolist(), len(slots)]
        there, prior = slots.to(device), before.to(device)
        return [
            CachedRun(
                node=None,
                first=int(positions[begin]),
                slots=there[begin:end],
                before=prior[begin : begin + 1] if int(before[begin]) >= 0 else None,
                absent=frozenset() if bool(resident[begin]) else PASSED,
            )
            for begin, end in pairwise(begins)
        ]

    def check(self, runs: Sequence[CachedRun]) -> list[Broken]:
        """Contradictions found by the core itself, and those between its counts and ``runs``."""
        found = []
        slots = (
            torch.cat([run.slots for run in runs]).cpu() if runs else torch.empty(0, dtype=torch.int64, device="cpu")
        )
        size = int(self._core.full_evictable_size() + self._core.full_protected_size())
        if size != len(slots):
            found.append(Broken(None, "sizes", f"it counts {size - len(slots):+} tokens beside what its nodes hold"))
        order = slots.sort().values
        twice = order[1:][order[1:] == order[:-1]].unique()
        found += [Broken(None, "slot_twice", f"slot {s} is in two of its nodes", slot=s) for s in twice[:64].tolist()]
        if self._core.enable_hicache:
            # Its own check wants to be told which copies between host and device are not done yet.
            return found
        try:
            self._core.sanity_check([], [])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            found.append(Broken(None, "core", f"its own check says: {str(error)[:500]}"))
        return found

    def _walk(self, resident_only: bool) -> tuple[Tensor, Tensor, Tensor]:
        walk = self._core.walk_for_kv_canary(unlocked_only=False, swa_resident_only=resident_only)
        slots, positions, before = (t.long().cpu() for t in (walk.slot_indices, walk.positions, walk.prev_slot_indices))
        return slots, positions, before


def tree_of(cache: Any) -> "NodeTree | RustTree | str":
    """The cache as a tree, or the reason why it can't be swept. Caches are recognised by the exact name of their class,
    since a subclass may store its nodes in another way."""
    kind = type(cache).__name__
    if kind in ("ChunkCache", "SWAChunkCache", "PureSWAChunkCache"):
        return OFF
    if getattr(cache, "disable", False):
        return OFF
    if kind == "UnifiedRadixCache":
        core = type(cache.tree_core).__name__
        if core == "RustUnifiedTreeCore":
            return RustTree(cache)
        return Unified(cache) if core == "UnifiedTreeCore" else f"{kind} with {core}, which is not known"
    trees: dict[str, type[NodeTree]] = {"RadixCache": Radix, "HiRadixCache": HostRadix, "SWARadixCache": WindowRadix}
    return trees[kind](cache) if kind in trees else f"{kind} is no prefix cache that this canary-sglang knows"


def node_tokens(key: Any, first: int, count: int) -> Tensor:
    """``count`` tokens of a node's key, from the token ``first`` on, int64 ``[count]``. If the key has pairs of tokens,
    the first token of each pair."""
    # A copy: torch can't share memory with SGLang's own arrays, which may be read-only.
    tokens = torch.tensor(folded(as_array(key.token_ids[first : first + count])), device="cpu")
    return tokens[:, 0] if tokens.dim() > 1 else tokens


def _named(node: int | None) -> str:
    return "missing" if node is None else f"node {node}"
