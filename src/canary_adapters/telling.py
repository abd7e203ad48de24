"""`Telling`: whose findings are told, in a process with several engines."""

from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Telling(Generic[Owner]):
    """The owners of the findings told now, e.g. the session of the runner at work. A finding names a region and a slot,
    which engines of one process have alike. Each thread has its own."""

    def __init__(self) -> None:
        self._now: ContextVar[Sequence[Owner] | None] = ContextVar("telling", default=None)

    def only(self, *owners: Owner) -> "Only[Owner]":
        """A context: findings told within are of ``owners``; of nobody to be acted for where there are none."""
        return Only(self._now, owners)

    def among(self, every: Sequence[Owner]) -> Sequence[Owner]:
        """The owners now; ``every`` where unknown, so that nothing wrong is left alone."""
        known = self._now.get()
        return every if known is None else known


class Only(Generic[Owner]):
    """See `Telling.only`; for one use. Each step of an engine has several, and a generator's context costs thrice."""

    __slots__ = ("_now", "_owners", "_token")

    def __init__(self, now: ContextVar[Sequence[Owner] | None], owners: Sequence[Owner]) -> None:
        self._now = now
        self._owners = owners

    def __enter__(self) -> None:
        self._token: Token[Sequence[Owner] | None] = self._now.set(self._owners)

    def __exit__(self, *_: object) -> None:
        self._now.reset(self._token)
