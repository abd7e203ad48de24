"""The engine's pool as a region: which slots there are, and where the bytes of each one lie."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from canary_adapters import PagedPool, stacked_layers
from canary_core import PoolAdapter, Region, tensors_of
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
        """Every tensor in which the engine keeps KV, found without a look at `regions`: what is missing there must not
        be missing here. An audit compares these."""
        return tensors_of(self._pool)
