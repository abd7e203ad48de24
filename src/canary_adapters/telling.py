"""`Telling`: whose findings are told, in a process with several engines."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Telling(Generic[Owner]):
    """The owners of the findings told now, e.g. the session of the runner at work. A finding names a region and a slot,
    which engines of one process have alike. Each thread has its own."""

    def __init__(self) -> None:
        self._now: ContextVar[Sequence[Owner] | None] = ContextVar("telling", default=None)

    @contextmanager
    def only(self, *owners: Owner) -> Iterator[None]:
        """Findings told within are of ``owners``; of nobody to be acted for where there are none."""
        token = self._now.set(owners)
        try:
            yield
        finally:
            self._now.reset(token)

    def among(self, every: Sequence[Owner]) -> Sequence[Owner]:
        """The owners now; ``every`` where unknown, so that nothing wrong is left alone."""
        known = self._now.get()
        return every if known is None else known
