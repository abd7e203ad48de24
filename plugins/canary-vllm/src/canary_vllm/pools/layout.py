"""`Layouts`: where the bytes of a token are in each layer's cache, by the layer's own store operation."""

from functools import partial

import torch
from torch import Tensor

from canary_adapters import ProbedPiece, probe_layout
from canary_core import KVSource
from canary_vllm.compat.layers import Store, element_type


class Layouts:
    """The layouts of one runner's layers, each sort probed once. ``dtype``: type of the model's activations."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[tuple[object, ...], tuple[ProbedPiece, ...]] = {}

    def sources(self, layer: object, cache: Tensor, pages: int, page: int, number: int) -> list[KVSource]:
        """Sources of ``layer`` number ``number``, whose ``cache`` has ``pages`` pages of ``page`` slots. Raises
        `AttachError` where its bytes can't be described."""
        store = Store.of(layer)
        key = (*store.sort, tuple(cache.shape), cache.stride(), cache.dtype, page)
        if key not in self._known:
            self._known[key] = probe_layout(partial(store, dtype=self._dtype), store.halves, cache, pages, page)
        return [piece.source(cache, page, number, element_type(layer, cache)) for piece in self._known[key]]
