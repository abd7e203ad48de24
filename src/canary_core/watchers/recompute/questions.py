"""`Questions`: put on any thread, answered on the engine's."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from canary_core.errors import CanaryError, error_text
from canary_core.watchers.recompute.verification import Verification


@dataclass(slots=True, eq=False)
class _Question:
    """One caller's. rest: verifications to come, None before the first; found: those so far."""

    request: str | None
    answer: "Future[list[Verification]]" = field(default_factory=Future)
    rest: Iterator[Verification] | None = None
    found: list[Verification] = field(default_factory=list)

    def end(self, why: str | None = None) -> None:
        """Gives the caller what was found, or the reason ``why`` nothing is."""
        if self.answer.done() or not self.answer.set_running_or_notify_cancel():
            return
        if why is None:
            self.answer.set_result(self.found)
        else:
            self.answer.set_exception(CanaryError(why))


class Questions:
    """Asks for the verification of one request, or (None) of all, in the order in which they came."""

    def __init__(self) -> None:
        self._open: deque[_Question] = deque()
        self._closed: str | None = None

    def __bool__(self) -> bool:
        return bool(self._open)

    def put(self, request: str | None) -> "Future[list[Verification]]":
        """Asks, and does not wait. For any thread. The result may be a `CanaryError`."""
        asked = _Question(request)
        self._open.append(asked)
        if self._closed is not None:
            self.close(self._closed)
        return asked.answer

    def serve(self, answer: Callable[[str | None], Iterable[Verification]]) -> None:
        """Gives ``answer`` to each one who waits. Never raises: an exception is what these get."""
        while self._open:
            self.step(answer)

    def step(self, answer: Callable[[str | None], Iterable[Verification]]) -> None:
        """One verification more for the first caller, or the end of these; others are served in between. Never
        raises."""
        why = None
        try:
            asked = self._open[0]
        except IndexError:
            # Another thread has closed.
            return
        try:
            if asked.rest is None:
                asked.rest = iter(() if asked.answer.done() else answer(asked.request))
            for found in () if asked.answer.done() else asked.rest:
                asked.found.append(found)
                return
        except Exception as error:
            why = f"the recompute failed: {error_text(error)}"
        with contextlib.suppress(ValueError):
            self._open.remove(asked)
        asked.end(why)

    def close(self, why: str) -> None:
        """Nothing is answered any more, to whoever asks; each is told ``why``."""
        self._closed = why
        while self._open:
            self._open.popleft().end(why)
