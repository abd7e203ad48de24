"""`Questions`: put on any thread, answered on the engine's."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from canary_core.errors import CanaryError, error_text
from canary_core.watchers.recompute.verification import Verification


class Questions:
    """Asks for the verification of one request, or (None) of all, in the order in which they came."""

    def __init__(self) -> None:
        self._open: deque[tuple[str | None, Future[list[Verification]]]] = deque()
        self._closed: str | None = None

    def __bool__(self) -> bool:
        return bool(self._open)

    def put(self, request: str | None) -> "Future[list[Verification]]":
        """Asks, and does not wait. For any thread. The result may be a `CanaryError`."""
        asked: Future[list[Verification]] = Future()
        self._open.append((request, asked))
        if self._closed is not None:
            self.close(self._closed)
        return asked

    def serve(self, answer: Callable[[str | None], list[Verification]]) -> None:
        """Gives ``answer`` to each one who waits. Never raises: an exception is what these get."""
        while self._open:
            request, asked = self._open.popleft()
            if not asked.set_running_or_notify_cancel():
                continue
            try:
                asked.set_result(answer(request))
            except Exception as error:
                asked.set_exception(CanaryError(f"the recompute failed: {error_text(error)}"))

    def close(self, why: str) -> None:
        """Nothing is answered any more, to whoever asks; each is told ``why``."""
        self._closed = why
        while self._open:
            _, asked = self._open.popleft()
            if asked.set_running_or_notify_cancel():
                asked.set_exception(CanaryError(why))
