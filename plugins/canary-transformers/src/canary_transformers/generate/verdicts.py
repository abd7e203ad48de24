"""`Verdicts`: what was found wrong in a cache, until its caller is told."""

from canary_core import Verdict, hookimpl
from canary_transformers.errors import WithheldError


class Verdicts:
    """Keeps the first verdict until it is taken."""

    def __init__(self) -> None:
        self._first: Verdict | None = None

    @hookimpl
    def canary_verdict(self, verdict: Verdict) -> None:
        """Comes at the end of the forward of the finding, on a CPU."""
        self._first = self._first or verdict

    def take(self) -> WithheldError | None:
        """The error for the kept verdict, if there is one; then none is kept."""
        verdict, self._first = self._first, None
        return None if verdict is None else WithheldError.of(verdict.finding)
