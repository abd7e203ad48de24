"""`EngineHooks`: functions of the engine that are wrapped for as long as somebody wants models guarded."""

from abc import ABC, abstractmethod
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar

from canary_core import Patches


class ModelOwner(Protocol):
    """Who wants models guarded: `canary_transformers.guard.Guard`."""

    def wants(self, model: Any) -> bool:
        """Whether caches of ``model`` are to be guarded."""


OwnerType = TypeVar("OwnerType", bound=ModelOwner)


class EngineHooks(ABC, Generic[OwnerType]):
    """The hooks of this process on one part of the engine. `add` an owner to install them; they are removed when the
    last one leaves."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._patches = Patches()
        self._owners: list[OwnerType] = []

    def add(self, owner: OwnerType) -> None:
        """Later owners come first where several want a model."""
        with self._lock:
            if not self._owners:
                self._install()
            if owner not in self._owners:
                self._owners.append(owner)

    def remove(self, owner: OwnerType) -> None:
        """Ends what is guarded for the owner; again: does nothing. Raises `ViolationError` in raise mode, where that is
        the first place that can."""
        with self._lock:
            if owner not in self._owners:
                return
            self._owners.remove(owner)
            if not self._owners:
                self._patches.undo()
            self._release(owner)

    @abstractmethod
    def _install(self) -> None:
        """Wraps what has to be wrapped."""

    @abstractmethod
    def _release(self, owner: OwnerType) -> None:
        """Ends what is guarded for ``owner``."""

    def _owner(self, model: Any) -> OwnerType | None:
        return next((o for o in reversed(self._owners) if o.wants(model)), None)
