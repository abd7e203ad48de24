"""Hooks continuous batching: every cache of a guarded model gets a `Session`, as soon as it exists.

Four methods of two classes are wrapped for the whole process, all else on single objects only.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from canary_core import ViolationError
from canary_transformers.continuous.session import Session
from canary_transformers.engine_hooks import EngineHooks, ModelOwner


class SessionOwner(ModelOwner, Protocol):
    """An owner of models to guard in continuous batching."""

    def open(self, model: Any, processor: Any, fresh: bool) -> Session | None:
        """Attaches to a `ContinuousBatchProcessor`; None if the attempt failed and the engine should go on."""

    def retire(self, session: Session) -> None:
        """The session's engine is gone: keeps its numbers, closes it."""


class ContinuousHooks(EngineHooks[SessionOwner]):
    """Gives each `ContinuousBatchProcessor` of a wanted model its `Session`, and brings findings to the waiting
    caller."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions: WeakKeyDictionary[Any, tuple[SessionOwner, Session | None]] = WeakKeyDictionary()
        self._errors: WeakKeyDictionary[Any, ViolationError] = WeakKeyDictionary()

    def _install(self) -> None:
        api = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
        manager, mixin = api.ContinuousBatchingManager, api.ContinuousMixin
        self._patches.wrap(manager, "_create_batch_processor", self._wrap_create)
        self._patches.wrap(manager, "_generation_step", self._wrap_step)
        self._patches.wrap(manager, "stop", self._wrap_stop)
        self._patches.wrap(mixin, "continuous_batching_context_manager", self._wrap_context)

    def _wrap_create(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _create_batch_processor(manager: Any, *args: Any, **kwargs: Any) -> Any:
            before = manager.batch_processor
            processor = original(manager, *args, **kwargs)
            # Here and not in the first step, so that a pool that can't be guarded is told to the caller's own thread.
            self._session(manager.model, processor, fresh=processor is not before)
            return processor

        return _create_batch_processor

    def _wrap_step(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def _generation_step(manager: Any, *args: Any, **kwargs: Any) -> None:
            processor = manager.batch_processor
            session = None if processor is None else self._session(manager.model, processor, fresh=False)
            if session is None:
                original(manager, *args, **kwargs)
                return
            try:
                session.step(lambda: original(manager, *args, **kwargs))
            except ViolationError as error:
                self._errors.setdefault(manager, error)
                raise

        return _generation_step

    def _wrap_stop(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def stop(manager: Any, *args: Any, **kwargs: Any) -> None:
            processor = manager.batch_processor
            original(manager, *args, **kwargs)
            # A thread that is still in a step would race with us; what it finds is reported by its own steps.
            if processor is not None and not manager.is_running():
                try:
                    self._stopped(processor, kept=manager.batch_processor is processor)
                except ViolationError as error:
                    self._errors.setdefault(manager, error)

        return stop

    def _wrap_context(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextlib.contextmanager
        def continuous_batching_context_manager(model: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            with original(model, *args, **kwargs) as manager:
                yield manager
            # The loop's own thread can only fail its requests. Here is the caller, who asked to be stopped.
            error = self._errors.pop(manager, None)
            if error is not None:
                raise error

        return continuous_batching_context_manager

    def _release(self, owner: SessionOwner) -> None:
        for processor, (owned_by, session) in list(self._sessions.items()):
            if owned_by is owner:
                del self._sessions[processor]
                if session is not None:
                    owner.retire(session)

    def _session(self, model: Any, processor: Any, fresh: bool) -> Session | None:
        with self._lock:
            known = self._sessions.get(processor)
            if known is not None:
                return known[1]
            owner = self._owner(model)
            if owner is None:
                return None
            session = owner.open(model, processor, fresh)
            self._sessions[processor] = owner, session
            return session

    def _stopped(self, processor: Any, kept: bool) -> None:
        owner, session = self._sessions.get(processor, (None, None))
        if owner is None or session is None:
            return
        try:
            session.drain()
        finally:
            if not kept:
                self._sessions.pop(processor, None)
                owner.retire(session)


HOOKS = ContinuousHooks()
"""The only one in the process: the engine's classes exist once."""
