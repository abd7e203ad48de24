"""`UnderWay`: batches of a scheduler between their making and the taking of their outputs."""

from collections import deque
from collections.abc import Collection

MOST_BATCHES = 64
"""Remembered: more than an engine has under way."""


class UnderWay:
    """The requests begun with each batch, or begun again after the loss of their blocks. Outputs are taken in the order
    of the batches."""

    def __init__(self) -> None:
        self._begun: deque[Collection[str]] = deque(maxlen=MOST_BATCHES)

    def made(self, begun: Collection[str]) -> None:
        """The scheduler has made one more batch."""
        self._begun.append(begun)

    def taken(self) -> None:
        """The scheduler has taken the output of the oldest one."""
        if self._begun:
            self._begun.popleft()

    @property
    def ahead(self) -> int:
        """The number of batches behind the oldest one."""
        return max(len(self._begun) - 1, 0)

    def __contains__(self, request: str) -> bool:
        return any(request in begun for begun in self._begun)
