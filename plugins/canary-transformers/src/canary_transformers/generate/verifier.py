"""`Verifiers`: rows of caches of `generate()` and direct calls, verified where their thread is between two forwards."""

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import pluggy
import torch

from canary_core import CanaryConfig, CanaryError, Questions, Verification
from canary_transformers.generate.guarded_cache import GuardedCache
from canary_transformers.generate.hooks import GENERATE
from canary_transformers.generate.recompute import CacheRecomputer

if TYPE_CHECKING:
    from canary_core import Recompute

GONE = "its cache is gone, or nothing of it is guarded any more; verify it while it is in use"


class ModelVerifier:
    """The second computations of one model. One at a time, whatever the thread."""

    def __init__(self, recomputer: CacheRecomputer) -> None:
        self.recomputer = recomputer
        self._recompute: Recompute | None = None
        self._lock = threading.Lock()

    @property
    def recompute(self) -> "Recompute":
        """Made on first use."""
        if self._recompute is None:
            from canary_core import Recompute

            self._recompute = Recompute(self.recomputer, self.recomputer)
        return self._recompute

    def now(self, names: Sequence[str]) -> list[Verification]:
        """On the thread of the rows' forwards, between these."""
        with self._lock, _apart():
            try:
                return [answer for name in names for answer in self.recompute.now(name)]
            finally:
                self.recomputer.done()

    def sample(self) -> None:
        """Computes a due row of ``CANARY_RECOMPUTE`` again; not while another thread does."""
        if self._lock.acquire(blocking=False):
            try:
                with _apart():
                    self.recompute.serve()
            finally:
                self.recomputer.done()
                self._lock.release()


class CacheVerifier:
    """Answers for the rows of one cache: `Canary.verifier`. waiting: called for each ask."""

    def __init__(self, cache: GuardedCache, verifier: ModelVerifier, waiting: Callable[[], None]) -> None:
        self._cache = ref(cache)
        self._verifier = verifier
        self._waiting = waiting
        self.questions = Questions()

    def ask(self, request: str | None = None, parked: bool = False) -> "Future[list[Verification]]":
        """See `Verifier.ask` of the core. Answered before the next forward of the cache's thread, or after its
        `generate()`."""
        if parked:
            return self._verifier.recompute.ask(request, parked=True)
        asked = self.questions.put(request)
        self._waiting()
        return asked

    def now(self, request: str | None = None) -> list[Verification]:
        """One row, or (None) all of the cache. On the cache's thread, between two forwards."""
        cache = self._cache()
        if cache is None:
            raise CanaryError(GONE)
        if request is not None and request.rpartition(" row ")[0] != cache.name:
            return [Verification(request, 0, "unjudged", f"it is no row of the cache {cache.name!r}")]
        return self._verifier.now(self._verifier.recomputer.rows(cache) if request is None else [request])

    def close(self) -> None:
        """Nothing is answered any more."""
        self.questions.close(GONE)


class Verifiers:
    """Of all models of a guard. ``caches``: the guard's. ``hooks``: gives those of a model."""

    def __init__(
        self, config: CanaryConfig, caches: Sequence[GuardedCache], hooks: Callable[[Any], pluggy.PluginManager]
    ) -> None:
        self._config = config
        self._hooks = hooks
        self._caches = caches
        self._models: WeakKeyDictionary[Any, ModelVerifier] = WeakKeyDictionary()
        self._waits = False

    def begin(self, cache: GuardedCache, model: Any, ranks: int) -> None:
        """Rows of a new cache can be verified."""
        verifier = self._models.get(model)
        if verifier is None:
            own = ref(model)
            caches = partial(self._caches_of, own)
            recomputer = CacheRecomputer(own, self._config, self._hooks, caches, ranks)
            verifier = self._models[model] = ModelVerifier(recomputer)
        cache.verifier = CacheVerifier(cache, verifier, self._wait)

    def between(self) -> None:
        """This thread is between two forwards: answers for the thread's caches. Never raises."""
        if self._waits:
            self._waits = False
            for cache, verifier in self._verified():
                if _mine(cache):
                    verifier.questions.serve(verifier.now)
                elif verifier.questions:
                    self._waits = True
        if self._config.recompute:
            for one in list(self._models.values()):
                one.sample()

    def verify(self, request: str | None, timeout_s: float) -> list[Verification]:
        """See `Guard.verify`."""
        if GENERATE.within:
            raise CanaryError("verify() was called within a forward; call it between two of them")
        deadline = time.monotonic() + timeout_s
        name = None if request is None else request.rpartition(" row ")[0]
        wanted = [(cache, one) for cache, one in self._verified() if name is None or cache.name == name]
        asked = [(cache, None if _mine(cache) else one.ask(request), one) for cache, one in wanted]
        answers: list[Verification] = []
        for cache, future, one in asked:
            answers += one.now(request) if future is None else _waited(cache, future, deadline, timeout_s)
        return answers

    def stats(self) -> Tally[str]:
        """Counters of rows whose caches are gone."""
        return sum((one.recomputer.counts for one in list(self._models.values())), Tally[str]())

    def _wait(self) -> None:
        self._waits = True

    def _caches_of(self, model: Callable[[], Any]) -> list[GuardedCache]:
        return [cache for cache in list(self._caches) if cache.model() is model() and cache.verifier is not None]

    def _verified(self) -> Iterable[tuple[GuardedCache, CacheVerifier]]:
        return [(cache, cache.verifier) for cache in list(self._caches) if cache.verifier is not None]


@contextmanager
def _apart() -> Iterator[None]:
    """Outside of the engine's modes: records are updated in place for longer than inference mode may last."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _mine(cache: GuardedCache) -> bool:
    """Whether this thread ran the last forward of a cache, or the thread of that forward has ended."""
    return cache.thread is threading.current_thread() or not cache.thread.is_alive()


def _waited(
    cache: GuardedCache, asked: "Future[list[Verification]]", deadline: float, timeout_s: float
) -> list[Verification]:
    try:
        return asked.result(max(deadline - time.monotonic(), 0.0))
    except LateError:
        asked.cancel()
        why = (
            f"its thread, {cache.thread.name!r}, did not come between two forwards within {timeout_s:g} s; verify it "
            "on this thread, or while it generates"
        )
    except CanaryError as error:
        why = str(error)
    return [Verification(cache.name, 0, "unjudged", why)]
