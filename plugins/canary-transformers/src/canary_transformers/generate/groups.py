"""`Group`: layers of a cache with the same way of keeping tokens, as one region."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from canary_adapters import Part, growing_source
from canary_core import KVSource, Placement, Region, RegionKind, SlotTable
from canary_transformers.generate.caches import Keeping, LayerView

LEAST_TOKENS = 128
"""Tokens a row of a growing cache has room for at first; doubled as needed."""


CROSS = "cross"
"""Name of a group of cross-attention."""


@dataclass(slots=True)
class Group:
    """A region of ``rows * capacity`` slots: slot ``r * capacity + i`` is index ``i`` of the tensors' batch row ``r``.

    It holds position ``first + i`` for ``i < held``. Where a window moves on, ``first`` grows and all bytes move to
    other indices, as slots do. ``bound``: where its bytes were found last, K and V of each layer in turn; ``places``:
    the same in short, see `places_of`.
    """

    name: str
    keeping: Keeping
    layers: tuple[int, ...]
    rows: int
    capacity: int
    first: int
    held: int
    bound: tuple[KVSource, ...] = ()
    places: Sequence[object] = ()
    _like: tuple["_Like", ...] = field(default=(), init=False)
    _whole: SlotTable | None = field(default=None, init=False)

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + self.held

    def region(self, views: Sequence[LayerView]) -> Region:
        """The region of the group's layers among ``views``."""
        window = self.keeping.window_tokens
        kind = RegionKind.FULL if window is None else RegionKind.WINDOW
        encoded = self.name.partition(".")[0] == CROSS
        return Region(self.name, self.rows * self.capacity, self.sources(views), kind, window, encoded=encoded)

    def sources(self, views: Sequence[LayerView]) -> tuple[KVSource, ...]:
        """K and V of each layer at the present place."""
        parts = [
            (Part(half, view.layer), self._within(tensor.detach()))
            for view in views
            if view.layer in self.layers
            for half, tensor in (("k", view.keys), ("v", view.values))
        ]
        self.places = self.places_of(views)
        if len(self.bound) == len(parts):
            before = zip(self.bound, self._like, parts, strict=True)
            self.bound = tuple(
                _moved(old, like, tensor) or growing_source(tensor, part, self.capacity)
                for old, like, (part, tensor) in before
            )
        else:
            self.bound = self._found(parts)
        self._like = tuple(_Like.of(source) for source in self.bound)
        return self.bound

    def _found(self, parts: Sequence[tuple[Part, Tensor]]) -> tuple[KVSource, ...]:
        """Sources found by search: once for all tensors with the same layout."""
        alike: dict[tuple[object, ...], KVSource] = {}
        found = []
        for part, tensor in parts:
            key = tensor.shape, tensor.stride(), tensor.dtype, tensor.layout
            like = alike.get(key)
            if like is None:
                like = alike[key] = growing_source(tensor, part, self.capacity)
            found.append(replace(like, tensor=tensor, half=part.half, layer=part.layer))
        return tuple(found)

    def _within(self, tensor: Tensor) -> Tensor:
        """The part of a layer's tensor with slots."""
        return tensor if tensor.shape[2] <= self.capacity else tensor[:, :, : self.capacity]

    def places_of(self, views: Sequence[LayerView]) -> Sequence[object]:
        """Address, tokens and strides of K and V of each layer: while unchanged, so are `sources`."""
        return [
            (tensor.data_ptr(), tensor.shape[2], tensor.stride())
            for view in views
            if view.layer in self.layers
            for tensor in (view.keys, view.values)
        ]

    def places_alike(self, tensors: Sequence[Tensor]) -> list[Placement] | None:
        """Layout of the first layer's K and V in the first two of ``tensors``, those of all layers in turn:
        `SlotEvents.rebind_alike` checks the others. None where another look at the layout is needed."""
        placed = [_placed(like, tensor) for like, tensor in zip(self._like[:2], tensors, strict=False)]
        places = [place for place in placed if place is not None]
        return places if len(places) == 2 else None

    def resized(self, rows: int, held: int) -> "Group":
        """The same with ``rows`` rows, and with room for ``held`` tokens of each."""
        capacity = self.capacity if held <= self.capacity else capacity_for(held)
        return replace(self, rows=rows, capacity=capacity, bound=(), places=())

    def let_go(self) -> None:
        """The layers' tensors are given up: none is kept here."""
        for source in self.bound:
            source.let_go()
        self.places = ()

    def slots(self, indices: range, rows: Tensor) -> Tensor:
        """Slots at ``indices`` of batch rows ``rows`` (int64 ``[n]``), int64 ``[n * len(indices)]``."""
        inside = torch.arange(indices.start, indices.stop, device=rows.device)
        return (rows[:, None] * self.capacity + inside).flatten()

    def table(self, end: int, device: torch.device, write_first: int | None = None, new: int = 0) -> SlotTable:
        """The table read by attention, up to position ``end``. ``write_first``: the forward's ``new`` tokens from
        ``end`` on go to their places after the rows begin with that position; None: to the table's places."""
        width = end + new
        moves = write_first is not None and new > 0
        if not moves and not self.first and width <= self.capacity:
            # Lengths say how much of it is read, so one table serves all forwards.
            if self._whole is None:
                self._whole = SlotTable(self._entries(self.capacity, device))
            return self._whole
        entries = self._entries(width, device)
        if write_first is None or not new:
            return SlotTable(entries)
        position = torch.arange(end, width, device=device) - write_first
        row = torch.arange(self.rows, device=device) * self.capacity
        stored = width - write_first
        # Rows move during the forward, so where the new tokens will be read from, this table doesn't say. A number that
        # follows the prompt's length would have kernels compiled for each length.
        return SlotTable(
            entries[:, :end],
            write_slots=(row[:, None] + position).flatten(),
            stored_tokens=stored if stored < new else 0,
        )

    def _entries(self, width: int, device: torch.device) -> Tensor:
        """The slots of positions up to ``width`` of each row, as numbered while rows begin with ``first``."""
        last = (self.rows - 1) * self.capacity
        numbers = torch.arange(-self.first, last + width - self.first, device=device)
        return numbers.as_strided((self.rows, width), (self.capacity, 1))


def groups_of(views: Sequence[LayerView], end: int, full: str = "full") -> list[Group]:
    """The groups of a cache with sequences of ``end`` tokens, in the order of their first layers; ``full`` is the name
    of those without a window. Layers that disagree
    with the first one of their group about the held tokens are left for the caller to notice."""
    members: dict[Keeping, list[LayerView]] = {}
    for view in views:
        members.setdefault(view.keeping, []).append(view)
    groups = []
    for keeping, alike in members.items():
        kind = full if keeping.window_tokens is None else "window"
        same_kind = sum((k.window_tokens is None) == (keeping.window_tokens is None) for k in members)
        name = kind if same_kind == 1 else f"{kind}.{keeping.window_tokens or keeping.static_tokens or 0}"
        held = end if keeping.window_tokens is None else min(alike[0].held, end)
        capacity = capacity_for(held) if keeping.static_tokens is None else rounded(keeping.static_tokens)
        layers = tuple(view.layer for view in alike)
        groups.append(Group(name, keeping, layers, alike[0].keys.shape[0], capacity, end - held, held))
    return groups


def disagreeing(views: Sequence[LayerView], groups: Sequence[Group], end: int) -> dict[int, int]:
    """Layers with other tokens than their group, with the length of their sequences."""
    by_layer = {view.layer: view for view in views}
    off = {}
    for group in groups:
        for layer in group.layers:
            view = by_layer.get(layer)
            if view is None:
                if end:
                    off[layer] = 0
            elif view.end is not None and (view.end, view.held) != (end, group.held):
                off[layer] = view.end
    return off


class _Like(NamedTuple):
    """Constant parts of a source when its tensor grows."""

    contents: tuple[int, int, int]
    dtype: torch.dtype
    chunks: int
    chunk_bytes: int

    @classmethod
    def of(cls, source: KVSource) -> "_Like":
        """The constant parts of ``source``."""
        rows, heads, _, dim = source.tensor.shape
        return cls((rows, heads, dim), source.tensor.dtype, source.chunks, source.chunk_bytes)


def _moved(old: KVSource, like: _Like, tensor: Tensor) -> KVSource | None:
    """``old`` at the present place, without another search for overlaps; None if more than the place is new."""
    place = _placed(like, tensor)
    return None if place is None else replace(old, tensor=tensor, **place._asdict())


def _placed(like: _Like, tensor: Tensor) -> Placement | None:
    """How a source's slots lie in ``tensor``; None if more than the place is new."""
    shape, strides = tensor.shape, tensor.stride()
    if strides[3] != 1 or (shape[0], shape[1], shape[3]) != like.contents or tensor.dtype != like.dtype:
        return None
    size = tensor.element_size()
    rows, heads, tokens = strides[0] * size, strides[1] * size, strides[2] * size
    # Contents of a slot in one piece, or heads that a batch or a token apart would overlap, are looked at again.
    if like.chunks != shape[1] or min(rows, heads, tokens) < like.chunk_bytes:
        return None
    return Placement(rows, tokens, heads if like.chunks > 1 else 0, shape[2])


def rounded(tokens: int) -> int:
    """Slots of a row for static tensors of so many ``tokens``, a quarter too many at most beyond 64: a number that is
    compiled into kernels, and `generate()` makes static tensors as long as prompt and answer."""
    step = max(16, 1 << max(tokens - 1, 0).bit_length() >> 3)
    return -(-tokens // step) * step


def capacity_for(held: int) -> int:
    """Room for twice as many tokens, so that growth is rare."""
    return max(LEAST_TOKENS, 1 << (2 * max(held, 1) - 1).bit_length())
