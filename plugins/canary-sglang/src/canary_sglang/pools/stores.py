"""`Stores`: reports each layer's store into the pool, once issued."""

from typing import Any

from canary_core import Canary, Patches

WHOLE = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
"""Pools with all bytes of a layer stored by one call."""

PARTS = {"SWAKVPool": ("full_kv_pool", "swa_kv_pool"), "HybridLinearKVPool": ("full_kv_pool",)}
"""Pools with inner pools for their stores."""

METHODS = ("set_kv_buffer", "set_mla_kv_buffer")


class Stores:
    """Follows the stores of one pool, with ``CANARY_STORE_CHECK``. Only pools known to store nothing of a layer later;
    by the exact name of their class, since a subclass may do more. Where an attention backend's own kernel stores,
    nothing is reported, and nothing is compared."""

    def __init__(self, canary: Canary, pool: Any) -> None:
        self._canary = canary
        self._pool = pool
        self._patches = Patches(canary.guard)
        if canary.step.stores.on and all(type(part).__name__ in WHOLE for part in _parts(pool)):
            for method in METHODS:
                if hasattr(pool, method):
                    self._patches.follow(type(pool), method, self._stored)

    def close(self) -> None:
        """Restores the functions of the pool's class."""
        self._patches.undo()

    def _stored(self, result: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
        layer = args[0] if args else kwargs.get("layer")
        number = getattr(layer, "layer_id", None)
        # Another model's pool may be of the same class.
        if pool is self._pool and number is not None:
            self._canary.step.stored(int(number))


def _parts(pool: Any) -> list[Any]:
    names = PARTS.get(type(pool).__name__)
    return [pool] if names is None else [getattr(pool, name) for name in names]
