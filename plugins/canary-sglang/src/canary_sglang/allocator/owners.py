"""`Owners`: the requests behind SGLang's calls of its allocators."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import batches, schedulers


class Owners:
    """The cause of the allocator's present call: the batch in preparation, or the request freeing slots."""

    def __init__(self, writers: RequestWriters) -> None:
        self._writers = writers
        self._batch: Any = None
        self._request: Any = None
        # Its writer id, once it was asked for.
        self._freer: int | None = -1
        self._drafted: _DraftedSlots | None = None
        self.evicting: Callable[[], bool] = lambda: False
        """Whether a prefix cache with parked slots frees them now."""

    def preparing(self, batch: Any, prepare: Callable[[], Any], decode: bool = False) -> Any:
        """Runs ``prepare``. Slots taken within are handed out to the requests of ``batch``, an extend or a decode."""
        # No context manager, which is slower: the engine waits for its host, here before each decode.
        before, self._batch = (self._batch, self._drafted), batch
        self._drafted = drafted = _DraftedSlots(batch) if decode and batches.speculates(batch) else None
        try:
            return prepare()
        finally:
            self._batch, self._drafted = before
            if drafted is not None:
                drafted.prepared()

    def releasing(self, request: Any, release: Callable[[], Any]) -> Any:
        """Runs ``release``. Slots freed within belonged to ``request``."""
        before, self._request, self._freer = (self._request, self._freer), request, None
        try:
            return release()
        finally:
            self._request, self._freer = before

    def freer(self) -> int:
        """Writer id of the request freeing slots; -1 without one, as in an eviction."""
        if self._freer is None:
            self._freer = self._writers.id(self._request.rid)
        return self._freer

    def each(self, ids: Sequence[int], counts: Sequence[int]) -> int | Callable[[], Tensor]:
        """See `RequestWriters.each`."""
        return self._writers.each(ids, counts)

    def taker(self, count: int, shares: Sequence[int] | None) -> int | Callable[[], int | Tensor]:
        """Receiver of ``count`` pages: a writer id, -1 if unknown, or a function that returns an int or int32
        ``[count]``.

        ``shares``: number of pages for each request of the batch, in the batch's order. None where unknown. Then, in
        preparation of a speculative decode, each gets as many as its allocated tokens grow; else one, if there are as
        many requests as pages; else, with pages of one slot, the need of its extend.
        """
        if self._batch is None or not count:
            return -1
        names = [request.rid for request in self._batch.reqs]
        if len(names) == 1:
            return partial(self._writers.id, names[0])
        if shares is None and self._drafted is not None:
            return partial(self._drafted.takers, self._writers, names, count)
        if shares is None and count == len(names):
            return partial(self._writers.ids, names)
        if shares is None:
            shares = getattr(self._batch, "extend_lens", None)
        if shares is None or len(shares) != len(names) or sum(shares) != count:
            return -1
        return partial(self._writers.repeated, names, list(shares))


class _DraftedSlots:
    """Numbers of slots for each request's drafted tokens in preparation of a decode. SGLang takes the slots of all
    requests at once, and its requests have their numbers only afterwards. Early enough: Canary asks for the writers
    when the event takes effect."""

    def __init__(self, batch: Any) -> None:
        self._requests = tuple(batch.reqs)
        self._before = [schedulers.allocated_tokens(request) for request in self._requests]
        self._shares: list[int] = []

    def prepared(self) -> None:
        """The batch was prepared."""
        after = [schedulers.allocated_tokens(request) for request in self._requests]
        self._shares = [end - begin for begin, end in zip(self._before, after, strict=True)]

    def takers(self, writers: RequestWriters, names: Sequence[str], count: int) -> int | Tensor:
        """Writer ids of ``count`` slots, int32 ``[count]``; -1 if the requests' lengths don't sum up to ``count``."""
        return writers.repeated(names, self._shares) if sum(self._shares) == count else -1
