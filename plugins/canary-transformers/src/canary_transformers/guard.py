"""`guard`: the public way to guard a model."""

from collections import Counter as Tally
from collections import deque
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any
from weakref import ref

import pluggy

from canary_adapters import hits_unchecked
from canary_core import (
    CanaryConfig,
    CanaryError,
    Event,
    Verification,
    Violation,
    Witness,
    attach,
    emit,
    hookimpl,
    private_hooks,
)
from canary_transformers import version
from canary_transformers.continuous.hooks import HOOKS
from canary_transformers.continuous.session import Session
from canary_transformers.filters import GivenEmbeddingFilter, embedding_filter, placeholder_tokens
from canary_transformers.generate.cross import CrossCache
from canary_transformers.generate.guarded_cache import GuardedCache
from canary_transformers.generate.hooks import GENERATE
from canary_transformers.generate.verifier import Verifiers

KEPT_VIOLATIONS = 10_000
"""Findings kept by `Guard.violations`; counts in `Guard.stats` are complete."""


class Guard:
    """Guards one model, or (``model`` None) every model of the process, until `close`.

    Usable as a context manager. Every cache made by the model from now on is guarded from its first forward; an
    existing one is adopted, with its content not judged until rewritten.

    ``config``: from `version.require_fit`, or the settings passed to `canary_install`.
    """

    def __init__(self, model: Any | None, config: CanaryConfig) -> None:
        self.config = config
        self._model = None if model is None else ref(model)
        self._plugins: list[object] = []
        self._violations: deque[Violation] = deque(maxlen=KEPT_VIOLATIONS)
        self._sessions: list[Session] = []
        self._caches: list[GuardedCache] = []
        self._cache_numbers = count(1)
        self._verifiers = Verifiers(config, self._caches, self._hooks)
        self._ended: Tally[str] = Tally()
        self._unguarded: set[tuple[str, str]] = set()
        self._blind = self._powerless = False
        self.witness = Witness()
        """Of all caches of `generate()` and of direct calls, which come and go."""
        if config.mode != "off":
            HOOKS.add(self)
            GENERATE.add(self)

    @property
    def judges(self) -> bool:
        """Whether the caches of an answer of `generate()` are kept until it is complete, to be compared or judged."""
        return self.config.mode != "off" and (self.config.hit_check or self.config.on_violation != "report")

    @property
    def withholds(self) -> bool:
        """Whether `generate()` compares all KV of an answer before it returns the answer."""
        return self.config.on_violation == "protect" and self.config.mode == "log"

    @property
    def violations(self) -> list[Violation]:
        """Findings so far, oldest first; without dismissed ones.

        For caches of `generate()` and of direct calls it waits for the GPU, so ask between forwards, on the same
        thread; for continuous batching it has the findings read by its loop so far.
        """
        if self.config.mode == "log":
            for cache in list(self._caches):
                cache.drain()
        return list(self._violations)

    def verify(self, request: str | None = None, timeout_s: float = 60.0, parked: bool = False) -> list[Verification]:
        """Has one running request, or (None) all of them, computed again, and compares the KV in the cache with the
        result: see docs/verify.md. A request is one of continuous batching by its name, or a row of a cache of
        `generate()` or direct calls: ``"generate 1 row 0"``. For continuous batching on another thread than the
        engine's; for a cache on any, between two forwards. ``parked``: what ended requests of continuous batching left
        in the prefix cache. Raises `CanaryError` if no guarded request exists, if continuous batching did not come
        between two forwards in time, or within a forward."""
        sessions, caches = list(self._sessions), [] if parked else list(self._caches)
        if not sessions and not caches:
            raise CanaryError(
                "no continuous batching is guarded just now, and no cache of generate() or direct calls is alive"
            )
        answers = [] if parked else self._verifiers.verify(request, timeout_s)
        if request is None:
            engines = [session.verifier.verify(None, timeout_s, parked) for session in sessions]
            return [*answers, *(one for engine in engines for one in engine)]
        if not answers and not sessions:
            raise CanaryError(f"{request!r} is no row of a cache that is guarded and alive")
        # A request is in one of them; the others would say that it does not run there.
        asked = [] if answers else sessions
        answers += [answer for session in asked for answer in session.verifier.verify(request, timeout_s, parked)]
        return [answer for answer in answers if answer.verdict != "unjudged"] or answers[:1]

    def stats(self) -> dict[str, int]:
        """`Canary.stats` of all caches so far, added up, as of their last host reads."""
        total = Tally({"violations": 0, "forwards": 0})
        total.update(self._ended)
        total.update(self._verifiers.stats())
        for session in list(self._sessions):
            total.update(session.canary.stats())
        for cache in list(self._caches):
            total.update(cache.stats())
        return dict(total)

    def register(self, plugin: object) -> None:
        """Adds an object with hook implementations for this guard only: for tests, faults and metrics."""
        self._plugins.append(plugin)
        for session in self._sessions:
            session.hooks.register(plugin)
        for cache in self._caches:
            cache.hooks.register(plugin)

    def close(self) -> None:
        """Reports pending findings and restores the engine. Call while the engine is idle; does nothing when called
        again."""
        try:
            HOOKS.remove(self)
        finally:
            GENERATE.remove(self)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def wants(self, model: Any) -> bool:
        """Whether ``model`` is the one, or all are."""
        return self._model is None or self._model() is model

    def open(self, model: Any, processor: Any, fresh: bool) -> Session | None:
        """A session for a `ContinuousBatchProcessor` of ``model``. If it can't be guarded: in log mode None, and a
        ``disabled`` event; in raise mode an exception."""
        hooks = self._hooks(model)
        build = partial(Session, processor, self.config, hooks, fresh)
        session = attach("attach to transformers", self.config, build, hooks)
        if session is not None:
            self._sessions.append(session)
        return session

    def retire(self, session: Session) -> None:
        """Keeps the session's counts and frees its memory."""
        session.close()
        self._sessions.remove(session)
        self._ended.update(session.canary.stats())

    def open_cache(self, model: Any) -> GuardedCache:
        """Begins to guard a cache of `generate()` or of a direct call of ``model``."""
        pad = getattr(model.get_input_embeddings(), "padding_idx", None)
        hooks = self._hooks(model)
        hooks.register(GivenEmbeddingFilter(placeholder_tokens(model)))
        if not self._blind and (untold := hits_unchecked(self.config)) is not None:
            self._blind = True
            emit(untold, hooks)
        cache = GuardedCache(f"generate {next(self._cache_numbers)}", self.config, hooks, self.witness, pad)
        cache.model = ref(model)
        self._verifiers.begin(cache, model, _ranks(model))
        self._caches.append(cache)
        if self.config.on_violation != "report" and _ranks(model) > 1:
            # One that raised alone would leave the others waiting in their next collective.
            cache.let_pass()
            if not self._powerless:
                self._powerless = True
                reason = "generate() runs on ranks of tensor parallelism, which can't raise together"
                emit(Event("quarantine_failed", "error", {"reason": reason}), hooks)
        return cache

    def open_cross(self, model: Any, whole: Any, own: GuardedCache) -> GuardedCache:
        """Begins to guard the cross-attention half of the cache ``whole``, whose other half is ``own``."""
        cache = CrossCache(whole, f"{own.name} encoder", self.config, self._hooks(model))
        self._caches.append(cache)
        if _ranks(model) > 1:
            cache.let_pass()
        return cache

    def retire_cache(self, cache: GuardedCache) -> None:
        """Keeps the cache's counts and frees its memory. Raises `ViolationError` in raise mode, for late findings."""
        if cache not in self._caches:
            return
        self._caches.remove(cache)
        try:
            cache.close()
        finally:
            self._ended.update(cache.stats())

    def settle(self, model: Any) -> None:
        """An answer of ``model`` is complete and everything was read: reports forwards that passed the hooks by."""
        event = self.witness.settle() if self.config.mode != "off" else None
        if event is not None:
            emit(event, self._hooks(model))

    def between(self) -> None:
        """This thread is between two forwards: computes due rows again. Never raises."""
        self._verifiers.between()

    def tell_unguarded(self, model: Any, reason: str) -> None:
        """A forward of ``model`` can't be guarded; told once for each class and reason."""
        sort = (type(model).__name__, reason)
        if sort not in self._unguarded:
            self._unguarded.add(sort)
            emit(Event("unguarded_forward", "warning", {"forward": sort[0], "reason": reason}), self._hooks(model))

    @hookimpl
    def canary_violation(self, violation: Violation) -> None:
        """Collects `violations`."""
        self._violations.append(violation)

    def _hooks(self, model: Any) -> pluggy.PluginManager:
        """One manager per cache: findings do not name their model or guard."""
        return private_hooks(embedding_filter(model), self, *self._plugins)


def _ranks(model: Any) -> int:
    """Number of ranks with a shard of ``model`` each."""
    mesh = getattr(model, "_device_mesh", None)
    return 1 if mesh is None else int(mesh.size())


def guard(model: Any, **config: object) -> Guard:
    """Guards ``model`` from now on; settings as in `CanaryConfig`, an argument wins over the environment.

    A plain call is enough: ``canary_transformers.guard(model)``. As a context manager it ends with the block. In raise
    mode a finding is raised where the caller waits: `generate`, a direct call, `generate_batch`, or the end of
    `continuous_batching_context_manager`. Raises `ConfigError` for a bad setting, `PluginError` if the installed
    Transformers must not be hooked: too old, or a function that is hooked is missing or has other parameters.
    """
    if model is None:
        raise TypeError("guard() needs a model, got None; to guard every model of the process set CANARY_PLUGINS")
    return Guard(model, version.require_fit(CanaryConfig.load(**config)))
