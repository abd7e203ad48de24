"""`CrossCache`: the half of an encoder-decoder cache with K and V of the encoder's states."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pluggy
from torch import Tensor

from canary_adapters import content_numbers
from canary_core import CanaryConfig
from canary_transformers.generate import caches
from canary_transformers.generate.caches import Keeping, LayerView
from canary_transformers.generate.forward import ModelCall
from canary_transformers.generate.groups import CROSS
from canary_transformers.generate.guarded_cache import GuardedCache


class CrossCache(GuardedCache):
    """The cross-attention half under guard: written by the first forward of an input, and read whole by each forward of
    its answer. A position is one of the encoder's states; in the place of a token it has a number of the state's
    content, so that an answer that goes on with K and V of another input is found. Follows the moves of rows as any
    cache; after a reset, or where ``whole`` says that its layers are to be filled, it begins anew.
    """

    _full = CROSS

    def __init__(self, whole: Any, name: str, config: CanaryConfig, hooks: pluggy.PluginManager) -> None:
        super().__init__(name, config, hooks)
        self._whole = ref(whole)
        self._keeps_book = False
        self._numbered_of: tuple[Callable[[], Tensor | None], int | None] = (lambda: None, None)
        self._numbers: Tensor | None = None

    def before(self, cache: Any, forward: ModelCall) -> None:
        """Checks the reads of all states."""
        if self._records is not None and self._keeps_book and not self._filled():
            self.cleared()
        super().before(cache, self._read(forward))

    def after(self, cache: Any, forward: ModelCall) -> None:
        """Records the states after the first forward; later ones write none."""
        if self._records is not None or self._over:
            super().after(cache, self._read(forward))
            return
        # Of an old cache, static tensors or not, nothing is known.
        self._was_empty = False
        new, numbers = 0, None
        with self._ours("the encoder's states"):
            new = max((view.end or 0 for view in self._look(cache, wait=True)), default=0)
            numbers = self._numbered(forward, new)
            self._keeps_book = self._filled()
        if new:
            super().after(cache, ModelCall(forward.rows, new, numbers, None))

    def cleared(self) -> None:
        """The states of another input come next."""
        with self._ours("reset"):
            self._retire()

    def _read(self, forward: ModelCall) -> ModelCall:
        """A forward that reads all states and writes none. Only `generate()` is known to give the right ones again."""
        numbers = None
        if self._records is not None and forward.answering:
            with self._ours("the states given"):
                numbers = self._numbered(forward, self._records.end)
        return ModelCall(forward.rows, 0, None, numbers)

    def _numbered(self, forward: ModelCall, states: int) -> Tensor | None:
        """A number of each state's content, int64 ``[rows, states]``, computed once for each tensor of states. None
        where these are none that K and V of so many states are made of."""
        given = forward.encoded
        if given is None or given.shape[:2] != (forward.rows, states) or not given.numel():
            return None
        tensor, version = self._numbered_of
        now = None if given.is_inference() else given._version
        if tensor() is not given or version != now:
            self._numbered_of = ref(given), now
            self._numbers = content_numbers(given.flatten(0, 1)).view(forward.rows, states)
        return self._numbers

    def _filled(self) -> bool:
        """Whether all layers have K and V of an input, by the cache's own book."""
        book = getattr(self._whole(), "is_updated", None)
        return isinstance(book, dict) and bool(book) and all(book.values())

    def _look(self, cache: Any, wait: bool = False) -> list[LayerView]:
        """All layers keep their tensors until the end, whatever their class."""
        views = caches.look(cache, wait)
        return [replace(v, keeping=Keeping(None, v.keys.shape[2])) for v in views if v.keeping.window_tokens is None]
