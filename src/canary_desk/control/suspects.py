"""Asks for verdicts on requests that something else than Canary suspects, and tells them as events."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from canary_core.errors import error_text
from canary_core.events import Event, Level
from canary_desk.control.verifications import ENDED, NOBODY

if TYPE_CHECKING:
    from canary_core.guard.canary import Canary
    from canary_core.watchers.recompute.verification import Verification

MOST_SUSPECTS = 16
"""Unanswered asks at a time in a process; more are counted as ``suspects_left_out``."""


class Suspects:
    """See `canary_suspect`. Never waits; answers are told on the engine's thread."""

    def __init__(self) -> None:
        self._open: list[Future[list[Verification]]] = []

    def suspect(self, canaries: "Sequence[Canary]", request: str, reason: str) -> None:
        """Asks each of ``canaries``, and tells those that can't answer."""
        self._open = [asked for asked in self._open if not asked.done()]
        for canary in canaries:
            if not canary.enabled or canary.verifier is None:
                _tell(canary, request, reason, "unjudged", NOBODY)
            elif len(self._open) >= MOST_SUSPECTS:
                canary.count("suspects_left_out")
            else:
                asked = canary.verifier.ask(request)
                self._open.append(asked)
                asked.add_done_callback(partial(_answered, canary, request, reason))


def _answered(canary: "Canary", request: str, reason: str, asked: "Future[list[Verification]]") -> None:
    if asked.cancelled():
        _tell(canary, request, reason, "unjudged", ENDED)
    elif (error := asked.exception()) is not None:
        _tell(canary, request, reason, "unjudged", error_text(error))
    else:
        for one in asked.result():
            _tell(canary, request, reason, one.verdict, one.finding or one.reason)


def _tell(canary: "Canary", request: str, reason: str, verdict: str, why: str | None) -> None:
    level: Level = "warning" if verdict == "differs" else "info"
    fields: dict[str, object] = {
        "request": request,
        "suspected": reason,
        "verdict": verdict,
        **({"reason": why} if why else {}),
    }
    canary.tell(Event("verified", level, fields))
