"""`CrossCache`: the half of an encoder-decoder cache with K and V of the encoder's states."""

from dataclasses import replace
from typing import Any

from canary_transformers.generate import caches
from canary_transformers.generate.caches import Keeping, LayerView
from canary_transformers.generate.forward import ModelCall
from canary_transformers.generate.guarded_cache import GuardedCache


class CrossCache(GuardedCache):
    """The cross-attention half under guard: written by the first forward of an input, and read whole by each forward of
    its answer. A position is one of the encoder's states; no token is known of it. Follows the moves of rows as any
    cache; after a reset it begins anew.
    """

    _full = "cross"

    def before(self, cache: Any, forward: ModelCall) -> None:
        """Checks the reads of all states."""
        super().before(cache, ModelCall(forward.rows, 0, None, None))

    def after(self, cache: Any, forward: ModelCall) -> None:
        """Records the states after the first forward; later ones write none."""
        new = 0
        if self._records is None and not self._over:
            # Of an old cache, static tensors or not, nothing is known.
            self._was_empty = False
            with self._ours("the encoder's states"):
                new = max((view.end or 0 for view in self._look(cache, wait=True)), default=0)
            if not new:
                return
        super().after(cache, ModelCall(forward.rows, new, None, None))

    def cleared(self) -> None:
        """The states of another input come next."""
        with self._ours("reset"):
            self._retire()

    def _look(self, cache: Any, wait: bool = False) -> list[LayerView]:
        """All layers keep their tensors until the end, whatever their class."""
        views = caches.look(cache, wait)
        return [replace(v, keeping=Keeping(None, v.keys.shape[2])) for v in views if v.keeping.window_tokens is None]
