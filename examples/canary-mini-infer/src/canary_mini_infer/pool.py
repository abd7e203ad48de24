"""The engine's pool as a region: which slots there are, and where the bytes of each one lie."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from canary_adapters import PagedPool, kv_layers
from canary_core import PoolAdapter, Region, tensors_of

REGION = "kv"


class MiniPool(PoolAdapter):
    """One region: K and V of all layers, ``[blocks, heads, slots of a block, dim]`` each, with the scales of int8.
    ``pool``: `mini_infer.cache.BlockPool`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def regions(self) -> Sequence[Region]:
        """The pool's slots. None is padding: mini-infer's batches have no rows without a request."""
        layers = kv_layers(self._pool.key_caches, self._pool.value_caches)
        if self._pool.key_scales is not None:
            scales = zip(layers, self._pool.key_scales, self._pool.value_scales, strict=True)
            layers = [replace(layer, scales={"k_scale": k, "v_scale": v}) for layer, k, v in scales]
        return PagedPool(REGION, layers, slot_dim=2).regions()

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """Every tensor in which the engine keeps KV, found without a look at `regions`."""
        return tensors_of(self._pool)
