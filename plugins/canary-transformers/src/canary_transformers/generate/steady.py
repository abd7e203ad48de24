"""`Steady`: a cache seen again and again, without a change from forward to forward except in its tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from canary_transformers.generate import caches
from canary_transformers.generate.caches import LayerView
from canary_transformers.generate.forward import ModelCall
from canary_transformers.generate.records import CacheRecords


@dataclass(slots=True, eq=False)
class Steady:
    """The layers of a cache that all keep every token, alike, and the places of their tensors after the last forward:
    shows changes since, and a forward's effect, at a fraction of the cost of `caches.look`.

    listed: all layers of the cache. layers: the guarded ones; tensors: K and V of each in turn, none while a forward
    makes others; shapes: of these; places: addresses and strides. growing: each forward makes other tensors. counted:
    for static layers, whether the host can ask for the number of tokens. end: tokens of a row.
    """

    listed: list[Any]
    layers: tuple[Any, ...]
    tensors: list[Tensor]
    shapes: list[torch.Size]
    places: list[object]
    growing: bool
    counted: bool
    end: int

    @classmethod
    def of(cls, cache: Any, views: Sequence[LayerView], end: int) -> "Steady | None":
        """From a cache found in the state ``views``; None for one to be looked at anew each time."""
        inner = caches.guarded(cache)
        if inner is None or not views or not caches.keeps_all(inner, views):
            return None
        listed = list(inner.layers)
        layers = tuple(listed[view.layer] for view in views)
        growing = views[0].keeping.static_tokens is None
        tensors = _tensors(layers)
        if not _plain(tensors):
            return None
        # Else to ask would be to wait for the device.
        counts = [getattr(layer, "cumulative_length", None) for layer in layers]
        counted = not growing and all(isinstance(n, Tensor) and n.device.type == "cpu" for n in counts)
        return cls(listed, layers, tensors, _shapes(tensors), _places(tensors), growing, counted, end)

    def held_after(self, cache: Any, records: CacheRecords, forward: ModelCall) -> dict[str, int] | None:
        """How many tokens of a row each group will hold after ``forward``; None where the cache, or the forward's rows,
        are not those of the last forward, or the groups have no room."""
        if self.end != records.end or forward.rows != records.rows:
            return None
        held = {group.name: group.held + forward.new for group in records.groups}
        return held if records.have_room(held) and self.kept(cache, self.end) else None

    def record(self, cache: Any, records: CacheRecords, forward: ModelCall) -> bool:
        """Records an ordinary forward: all layers hold its tokens, and nothing else is new. Returns whether the case
        applies; if not, nothing was recorded."""
        if not forward.new:
            return False
        end = records.end + forward.new
        if self.growing:
            moved = self._moved(cache, end)
            if moved is None or not records.rebind_alike(moved):
                return False
            self._follow(moved, end, places=records.compares_reads)
        elif self.kept(cache, end) and self.in_place():
            self.end = end
        else:
            return False
        records.record(None, forward)
        return True

    def kept(self, cache: Any, end: int) -> bool:
        """Whether the layers have the same tensors as after the last forward, with ``end`` tokens, as far as the host
        can know."""
        if not self.tensors or not self._known(cache) or not _all_same(_tensors(self.layers), self.tensors):
            return False
        # A growing tensor that was cut holds fewer.
        return self._holds(end) and not (self.growing and _shapes(self.tensors) != self.shapes)

    def in_place(self) -> bool:
        """Whether the bytes of all tensors are in place: a lasting tensor may get another shape, or other memory. To be
        asked before any read."""
        return _shapes(self.tensors) == self.shapes and _places(self.tensors) == self.places

    def _follow(self, tensors: list[Tensor], end: int, places: bool) -> None:
        """The layers have made ``tensors`` with ``end`` tokens; `SlotEvents.rebind_alike` has found all K alike, and
        all V. ``places``: whether `in_place` will be asked."""
        self.tensors, self.end = tensors, end
        self.shapes = _shapes(tensors[:2]) * len(self.layers)
        self.places = _places(tensors) if places else []

    def _moved(self, cache: Any, end: int) -> list[Tensor] | None:
        """The tensors of growing layers, if the first holds ``end`` tokens; the others' likeness is left to
        `SlotEvents.rebind_alike`."""
        if not self._known(cache):
            return None
        tensors = _tensors(self.layers)
        if not _plain(tensors) or tensors[0].shape != (*self.shapes[0][:2], end, self.shapes[0][3]):
            return None
        return tensors

    def let_go(self) -> None:
        """A forward begins, and growing layers will make other tensors."""
        if self.growing:
            self.tensors = []

    def _known(self, cache: Any) -> bool:
        """Whether the cache has the same layers as before."""
        inner = caches.guarded(cache)
        return inner is not None and len(inner.layers) == len(self.listed) and _all_same(inner.layers, self.listed)

    def _holds(self, end: int) -> bool:
        return not self.counted or all(int(layer.cumulative_length) == end for layer in self.layers)


def _tensors(layers: Sequence[Any]) -> list[Any]:
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def _shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _places(tensors: Sequence[Tensor]) -> list[object]:
    return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]


def _plain(tensors: Sequence[Any]) -> bool:
    """Whether all are tensors fit to be kept: a history of gradients would be kept along."""
    return not any(tensor is None or tensor.requires_grad for tensor in tensors)


def _all_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return all(map(is_, some, others))
