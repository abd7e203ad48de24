"""The engine's pool as a region: which slots there are, and where the bytes of each one lie."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from canary_adapters import PagedPool, stacked_layers
from canary_core import PoolAdapter, Region
from canary_toy.toy_engine import PAGE, KVPool

REGION = "kv"


class ToyPool(PoolAdapter):
    """One region: K and V of all layers, in pages of `PAGE` slots."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def regions(self) -> Sequence[Region]:
        """The pool's slots. Page 0 is the null block: all its slots are padding."""
        return PagedPool(REGION, stacked_layers(self._pool.layers), null_slot=range(PAGE)).regions()

    def pool_tensors(self) -> Mapping[str, Tensor]:
        """Every tensor in which the engine keeps KV, whether it is guarded or not. An audit compares them."""
        return {f"layers.{i}": tensor for i, tensor in enumerate(self._pool.layers)}
