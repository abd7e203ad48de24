"""The built-in plugin ``notify``: tells somebody outside of the engine what to act on."""

import os
import time
from typing import TYPE_CHECKING
from weakref import ref

from canary_core.errors import CanaryError
from canary_core.events import Event
from canary_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from canary_core.desk.notify.sender import Sender
    from canary_core.guard.canary import Canary

TOLD = ("diagnosis", "diagnosis_failed", "incidents_limited", "alarm_dead", "disabled")
"""Events that somebody should act on."""

LEFT_OUT = ("token", "stored_token", "explanation", "traceback")
"""Fields with users' tokens, or of no use outside."""

LAST_S = 5.0
"""Longest wait at the end of an engine, and before a finding stops one."""

AGAIN_S = 60.0
"""Least seconds between two events about failed notifications."""


class Notify:
    """Sends the events of `TOLD`, and ``incident`` where nobody looks at incidents, to the target of the first Canary
    with ``CANARY_NOTIFY``; suppressed ones not. One sender for each manager and process."""

    def __init__(self) -> None:
        self._sender: Sender | None = None
        self._process = 0
        self._names: tuple[str, ...] = TOLD
        self._last_failure = -AGAIN_S

    @hookimpl
    def canary_attached(self, canary: "Canary") -> None:
        """Makes the sender. A key that can't be read is told, and nothing is sent: unsigned it would be refused."""
        config = canary.config
        if not config.notify or (self._sender is not None and self._process == os.getpid()):
            return
        from canary_core.desk.notify.sender import Sender, Target

        known = ref(canary)

        def failed(reason: str, lost: int) -> None:
            told_to = known()
            if told_to is not None and time.monotonic() - self._last_failure >= AGAIN_S:
                self._last_failure = time.monotonic()
                told_to.tell(Event("notify_failed", "warning", {"reason": reason, "lost": lost}))

        try:
            self._sender = Sender(Target.of(config.notify, config.notify_key_file), failed)
        except CanaryError as error:
            canary.tell(Event("notify_failed", "warning", {"reason": f"{error}; nobody is notified", "lost": 0}))
            return
        self._process = os.getpid()
        self._names = TOLD if config.diagnose else (*TOLD, "incident")

    @hookimpl
    def canary_event(self, event: Event) -> None:
        """Queues ``event`` if somebody should act on it."""
        if self._sender is None or event.name not in self._names or event.fields.get("suppressed"):
            return
        if self._process == os.getpid():
            fields = {name: value for name, value in event.fields.items() if name not in LEFT_OUT}
            self._sender.send({"version": 1, "event": event.name, "level": event.level, "time": time.time(), **fields})

    @hookimpl(trylast=True)
    def canary_settle(self, canary: "Canary", last: bool) -> None:
        """At the end, and before a finding stops the engine, waits for deliveries."""
        if self._sender is not None and (last or canary.mode == "raise"):
            self._sender.finish(LAST_S)
