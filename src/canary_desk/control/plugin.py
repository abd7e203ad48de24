"""The built-in plugin ``control``: opens the control socket once a pool is guarded."""

import atexit
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from canary_core.config import CanaryConfig
from canary_core.errors import ControlError, error_text
from canary_core.events import Event
from canary_core.plugins.hookspecs import hookimpl
from canary_desk.control.commands import Commands
from canary_desk.control.server import Server
from canary_desk.control.suspects import Suspects
from canary_desk.metrics.readings import READINGS

if TYPE_CHECKING:
    from canary_core.guard.canary import Canary


class Socket:
    """The control socket of one process: made at the first guarded pool, with its settings, and kept until the process
    ends. A failure is reported once, and the engine goes on undisturbed."""

    def __init__(self) -> None:
        self.commands = Commands(READINGS, writable=False)
        self.server: Server | None = None
        self._tried: int | None = None
        self._lock = threading.Lock()

    def begin(self, config: CanaryConfig) -> Event | None:
        """Opens the socket if ``config`` asks for one, at the first try in this process; returns the event to
        report."""
        with self._lock:
            if config.control == "off" or self._tried == os.getpid():
                return None
            self._tried = os.getpid()
            self.commands.writable = config.control == "write"
            try:
                self.server = Server(path(config), self.commands.answer)
            except Exception as error:  # the engine goes on, whatever the system thinks of this
                reason = str(error) if isinstance(error, ControlError) else error_text(error)
                return Event("control_unavailable", "warning", {"reason": reason})
            atexit.register(self.server.close)
            return Event("control", "info", {"socket": str(self.server.path), "allows": config.control})


def path(config: CanaryConfig) -> Path:
    """Path of the process's socket."""
    return config.control_folder() / f"{os.getpid()}.sock"


SOCKET = Socket()
"""The socket of this process."""

SUSPECTS = Suspects()
"""The suspects of this process."""


class Control:
    """The plugin. Each manager has its own; the socket is the process's."""

    @hookimpl
    def canary_attached(self, canary: "Canary") -> None:
        """Opens the socket, unless already open."""
        READINGS.add(canary)
        event = SOCKET.begin(canary.config)
        if event is not None:
            canary.tell(event)

    @hookimpl
    def canary_suspect(self, request: str, reason: str) -> None:
        """Has each Canary of the process asked."""
        SUSPECTS.suspect(READINGS.running(), request, reason)

    @hookimpl
    def canary_detached(self, canary: "Canary") -> None:
        """Keeps the closed Canary's figures in the totals."""
        READINGS.end(canary)
