"""Walks through a prefix cache piece by piece. The engine may change the cache between two pieces."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from canary_core import CachedRun
from canary_sglang.prefix_cache.tree import PASSED, Broken, NodeTree, RustTree, node_tokens

DEEPEST = 1 << 20
"""Most parents of a node; with more it counts as lost, in a circle of links."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest size of a piece."""

    nodes: int
    slots: int

    def times(self, factor: int) -> "Limit":
        """A limit ``factor`` times as large."""
        return Limit(self.nodes * factor, self.slots * factor)


@dataclass(frozen=True, slots=True, eq=False)
class HostRun:
    """Consecutive tokens of one node with copies in host memory. ``first``: position of the first one. ``slots``:
    integer ``[n]``, slots of the host pool, on the host. ``tokens``: int64 ``[n]``."""

    node: int
    first: int
    slots: Tensor
    tokens: Tensor


@dataclass(slots=True)
class Piece:
    """The part of a cache that was walked at one moment. ``runs``: tokens with slots on the device. ``nodes``: the node
    of each run, empty where the cache gives none. ``host_runs``: tokens in host memory, of these and other nodes.
    ``broken``: contradictions in the cache."""

    runs: list[CachedRun] = field(default_factory=list)
    host_runs: list[HostRun] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    again: bool = False
    """Whether the nodes were walked before in the same walk."""


class Walk(ABC):
    """One walk through a cache. ``nodes``, ``tokens``: how many were walked. ``vanished``: nodes that were removed
    before they were walked. ``on_host``: nodes without slots on the device. ``sizes_checked``: whether the cache's own
    counts were compared. ``ended``: whether all was walked."""

    def __init__(self) -> None:
        self.nodes = 0
        self.tokens = 0
        self.vanished = 0
        self.on_host = 0
        self.sizes_checked = False
        self.ended = False

    @abstractmethod
    def next(self, limit: Limit, moment: int) -> Piece:
        """The next piece, of at most ``limit``. Must not be called once `ended`. Between two calls with the same
        ``moment`` the cache must not change."""

    def again(self, nodes: list[Any]) -> Piece:
        """All tokens of the ``nodes`` still in the cache."""
        return Piece(again=True)


class NodeWalk(Walk):
    """Walks from the root down. Nodes added during the walk are left for the next one, except those put by a split
    above a node not yet walked."""

    def __init__(self, tree: NodeTree) -> None:
        super().__init__()
        self._tree = tree
        self._root = tree.root
        # A node, how many of its slots were walked, and the tensor that held them.
        self._stack: list[tuple[Any, int, Tensor | None]] = [(self._root, 0, None)]
        self._visited: set[int] = set()
        self._sums: dict[str, tuple[int, int]] = {}
        self._believed = tree.sizes()
        self._moment: int | None = None
        self._moved = False

    def next(self, limit: Limit, moment: int) -> Piece:
        """See `Walk`."""
        self._moved = self._moved or self._moment not in (None, moment) or self._tree.root is not self._root
        self._moment = moment
        if self._tree.root is not self._root:
            self.vanished += len(self._stack)
            self._stack.clear()
        piece, starts = Piece(), dict[int, int]()
        last = self.nodes + limit.nodes
        slots = limit.slots
        while self._stack and self.nodes < last and slots > 0:
            slots -= self._take(piece, starts, slots)
        if not self._stack:
            self.ended = True
            piece.broken += self._check_sizes()
        return piece

    def again(self, nodes: list[Any]) -> Piece:
        """See `Walk`."""
        piece, starts = Piece(again=True), dict[int, int]()
        for node in nodes:
            slots = self._tree.slots(node)
            start = self._start(node, starts)
            if start is not None and slots is not None and len(slots):
                self._add_run(piece, node, start, (0, len(slots)), slots)
        return piece

    def _take(self, piece: Piece, starts: dict[int, int], most: int) -> int:
        """Walks at most ``most`` slots of the node on top of the stack; gives how many."""
        node, offset, walked = self._stack.pop()
        start = self._start(node, starts)
        if start is None:
            self.vanished += 1
            return 0
        slots = self._tree.slots(node)
        held = self._tree.host(node) if slots is None else slots
        if offset and held is not walked:
            # The node was split or moved to other slots after its first part was walked.
            offset = 0
        elif not offset:
            if node.id in self._visited:
                return 0
            self._visit(piece, node)
        if node is self._root:
            return 0
        self.on_host += slots is None and not offset
        if held is None:
            return 0
        part = offset, min(len(held), offset + most)
        if part[1] > offset:
            self._add_host_run(piece, node, start, part)
            if slots is not None:
                self._add_run(piece, node, start, part, slots)
                self.tokens += part[1] - offset
        if part[1] < len(held):
            self._stack.append((node, part[1], held))
        return part[1] - offset

    def _visit(self, piece: Piece, node: Any) -> None:
        self._visited.add(node.id)
        is_root = node is self._root
        self.nodes += not is_root
        piece.broken += self._tree.check(node, is_root)
        if not is_root:
            self._tree.add(self._sums, node)
        self._stack += [(child, 0, None) for child in node.children.values()]

    def _add_run(self, piece: Piece, node: Any, start: int, part: tuple[int, int], slots: Tensor) -> None:
        begin, end = part
        if begin:
            before: Tensor | None = slots[begin - 1 : begin]
        else:
            above = None if node.parent is self._root else self._tree.slots(node.parent)
            before = None if above is None or not len(above) else above[-1:]
        known = len(slots) == len(node.key)
        passed = self._tree.has_window and not self._tree.holds_window(node)
        piece.runs.append(
            CachedRun(
                node=node.id,
                first=start + begin,
                slots=slots[begin:end],
                before=before,
                tokens=node_tokens(node.key, begin, end - begin) if known else None,
                absent=PASSED if passed else frozenset(),
            )
        )
        piece.nodes.append(node)

    def _add_host_run(self, piece: Piece, node: Any, start: int, part: tuple[int, int]) -> None:
        host = self._tree.host(node)
        if host is not None and len(host) == len(node.key):
            begin, end = part
            tokens = node_tokens(node.key, begin, end - begin)
            piece.host_runs.append(HostRun(node.id, start + begin, host[begin:end].cpu(), tokens))

    def _start(self, node: Any, starts: dict[int, int]) -> int | None:
        """Position of the node's first token, None if the node is no longer in the tree. ``starts``: the known
        positions of the moment, by ``id()`` of the node."""
        path: list[Any] = []
        at = node
        while at is not self._root and id(at) not in starts:
            if not self._tree.has(at.parent, at) or len(path) > DEEPEST:
                return None
            path.append(at)
            at = at.parent
        position = 0 if at is self._root else starts[id(at)]
        if path and at is not self._root:
            position += len(at.key)
        for above in reversed(path):
            starts[id(above)] = position
            position += len(above.key)
            if above.id not in self._visited and above is not node:
                self._stack.append((above, 0, None))
        return 0 if node is self._root else starts[id(node)]

    def _check_sizes(self) -> list[Broken]:
        """Compares the cache's own counts with its nodes, if the cache did not change during the walk."""
        sizes = self._tree.sizes()
        if self._moved or sizes != self._believed:
            return []
        self.sizes_checked = True
        found = []
        for name, believed in sizes.items():
            held = self._sums.get(name, (0, 0))
            if held != believed:
                # The difference, not the numbers: so a leak is one finding, even if the cache changes.
                more = believed[0] - held[0], believed[1] - held[1]
                detail = f"it counts {more[0]:+} evictable and {more[1]:+} protected tokens beside what its nodes hold"
                found.append(Broken(None, "sizes", detail, name))
        return found


class FlatWalk(Walk):
    """Walks a core that lists all its slots at once, as of the moment of the first piece. If the cache may have changed
    since, the rest is left out."""

    def __init__(self, tree: RustTree, device: torch.device) -> None:
        super().__init__()
        self._tree = tree
        self._device = device
        self._runs: list[CachedRun] | None = None
        self._moment = -1

    def next(self, limit: Limit, moment: int) -> Piece:
        """See `Walk`."""
        piece = Piece()
        if self._runs is None:
            runs = self._tree.runs(self._device)
            self._runs, self._moment = runs[::-1], moment
            self.sizes_checked = True
            piece.broken += self._tree.check(runs)
        if moment != self._moment:
            self.vanished += len(self._runs)
            self._runs = []
        slots = limit.slots
        while self._runs and slots > 0:
            run = self._runs.pop()
            piece.runs.append(run)
            slots -= len(run)
            self.tokens += len(run)
            self.nodes += 1
        self.ended = not self._runs
        return piece
