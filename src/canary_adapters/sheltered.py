"""`Sheltered`: an engine's own code, from exceptions of Canary's."""

from collections.abc import Callable


class Sheltered:
    """A context from which no exception leaves: ``told`` is called with ``where`` and the exception. Each call of an
    engine may have one, and a generator's context costs thrice."""

    __slots__ = ("_told", "_where")

    def __init__(self, told: Callable[[str, Exception], None], where: str) -> None:
        self._told, self._where = told, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, Exception):
            self._told(self._where, error)
        return isinstance(error, Exception)
