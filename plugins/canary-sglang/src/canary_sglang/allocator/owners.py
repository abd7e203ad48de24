"""On whose behalf SGLang calls its allocators."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from canary_sglang.batches.writers import RequestWriters
from canary_sglang.compat import batches, schedulers


class Owners:
    """On whose behalf the allocator is called: the batch that is prepared, the request that lets go."""

    def __init__(self, writers: RequestWriters) -> None:
        self._writers = writers
        self._batch: Any = None
        self._request: Any = None
        self._ahead: _Ahead | None = None

    @contextmanager
    def preparing(self, batch: Any, decode: bool = False) -> Iterator[None]:
        """What is handed out meanwhile is for the requests of ``batch``, an extend or a decode."""
        before, self._batch = (self._batch, self._ahead), batch
        self._ahead = ahead = _Ahead(batch) if decode and batches.speculates(batch) else None
        try:
            yield
        finally:
            self._batch, self._ahead = before
            if ahead is not None:
                ahead.prepared()

    def releasing(self, request: Any, release: Callable[[], Any]) -> Any:
        """Runs ``release``: what is taken back meanwhile was given up by ``request``."""
        # Not a context: a batch of requests that end lets an engine wait for its host.
        before, self._request = self._request, request
        try:
            return release()
        finally:
            self._request = before

    def freer(self) -> int:
        """Writer id of the request that lets go, -1 where the engine does so of its own accord, as in an eviction."""
        return -1 if self._request is None else self._writers.id(self._request.rid)

    def taker(self, count: int, shares: Sequence[int] | None) -> int | Callable[[], int | Tensor]:
        """Who gets ``count`` pages of which each request of the batch gets ``shares``, in its order; None for one each
        or, where slots are handed out one by one, what its extend needs, or what it has more of once it was prepared to
        draft ahead."""
        if self._batch is None or not count:
            return -1
        names = [request.rid for request in self._batch.reqs]
        if len(names) == 1:
            return partial(self._writers.id, names[0])
        if shares is None and self._ahead is not None:
            return partial(self._ahead.takers, self._writers, names, count)
        if shares is None and count == len(names):
            return partial(self._writers.ids, names)
        if shares is None:
            shares = getattr(self._batch, "extend_lens", None)
        if shares is None or len(shares) != len(names) or sum(shares) != count:
            return -1
        return partial(self._writers.repeated, names, list(shares))


class _Ahead:
    """How many slots each request of a batch gets when it is prepared to draft ahead. SGLang tells only after it took
    them all at once; the core asks who got them later still, when the event takes effect."""

    def __init__(self, batch: Any) -> None:
        self._requests = tuple(batch.reqs)
        self._before = [schedulers.allocated_tokens(request) for request in self._requests]
        self._shares: list[int] = []

    def prepared(self) -> None:
        """The batch was prepared."""
        after = [schedulers.allocated_tokens(request) for request in self._requests]
        self._shares = [end - begin for begin, end in zip(self._before, after, strict=True)]

    def takers(self, writers: RequestWriters, names: Sequence[str], count: int) -> int | Tensor:
        """Writer ids of ``count`` slots, -1 if the requests' lengths don't tell."""
        return writers.repeated(names, self._shares) if sum(self._shares) == count else -1
