"""`Late`: a watcher that gathers on the device, and judges on the host when that has arrived."""

from typing import Protocol


class Late(Protocol):
    """Called at each read of the counters, between forwards, never captured."""

    def send(self) -> None:
        """Starts the copy of gathered rows, on the current stream. Never waits."""

    def read(self) -> None:
        """Judges what has arrived. Never waits."""
