"""`EngineHooks`: functions of the engine, wrapped while somebody wants models guarded."""

from abc import ABC, abstractmethod
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar

from canary_core import Patches


class ModelOwner(Protocol):
    """An owner of models to guard: `canary_transformers.guard.Guard`."""

    def wants(self, model: Any) -> bool:
        """Whether caches of ``model`` are to be guarded."""


OwnerType = TypeVar("OwnerType", bound=ModelOwner)


class EngineHooks(ABC, Generic[OwnerType]):
    """The hooks of the process on one part of the engine. `add` an owner to install them; the last `remove` removes
    them."""

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
        """Ends the owner's guard; does nothing when called again. Raises `ViolationError` in raise mode, if this is the
        first place to raise one."""
        with self._lock:
            if owner not in self._owners:
                return
            self._owners.remove(owner)
            if not self._owners:
                self._patches.undo()
            self._release(owner)

    @abstractmethod
    def _install(self) -> None:
        """Wraps the functions."""

    @abstractmethod
    def _release(self, owner: OwnerType) -> None:
        """Ends the guard for ``owner``."""

    def _owner(self, model: Any) -> OwnerType | None:
        return next((o for o in reversed(self._owners) if o.wants(model)), None)
