"""The built-in plugin ``notify``: tells somebody outside of the engine what to act on."""

import os
import time
from typing import TYPE_CHECKING
from weakref import ref

from canary_core.errors import CanaryError
from canary_core.events import Event
from canary_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from canary_core.guard.canary import Canary
    from canary_desk.notify.sender import Sender
    from canary_desk.notify.unready import Unready

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
    with ``CANARY_NOTIFY``, and counts them for the first ``CANARY_UNREADY_FILE``; suppressed ones not. One sender and
    one file for each manager and process."""

    def __init__(self) -> None:
        self._sender: Sender | None = None
        self._unready: Unready | None = None
        self._process = 0
        self._names: tuple[str, ...] = TOLD
        self._last_failure = -AGAIN_S

    @hookimpl
    def canary_attached(self, canary: "Canary") -> None:
        """Makes the sender, and the counter of the file. A key that can't be read is told, and nothing is sent:
        unsigned it would be refused."""
        config = canary.config
        if self._process != os.getpid():
            self._process, self._sender, self._unready = os.getpid(), None, None
        names = TOLD if config.diagnose else (*TOLD, "incident")
        known = ref(canary)

        def tell(event: Event) -> None:
            if (told_to := known()) is not None:
                told_to.tell(event)

        if config.unready_file and self._unready is None:
            from canary_desk.notify.unready import Unready

            self._unready, self._names = Unready(config.unready_file, config.unready_after, tell), names
        if not config.notify or self._sender is not None:
            return
        from canary_desk.notify.sender import Sender, Target

        def failed(reason: str, lost: int) -> None:
            if time.monotonic() - self._last_failure >= AGAIN_S:
                self._last_failure = time.monotonic()
                tell(Event("notify_failed", "warning", {"reason": reason, "lost": lost}))

        try:
            self._sender, self._names = Sender(Target.of(config.notify, config.notify_key_file), failed), names
        except CanaryError as error:
            tell(Event("notify_failed", "warning", {"reason": f"{error}; nobody is notified", "lost": 0}))

    @hookimpl
    def canary_event(self, event: Event) -> None:
        """Queues ``event`` if somebody should act on it."""
        if event.fields.get("suppressed") or self._process != os.getpid():
            return
        if self._unready is not None and event.name in (*self._names, "findings_limited"):
            self._unready.hear(event)
        if self._sender is not None and event.name in self._names:
            fields = {name: value for name, value in event.fields.items() if name not in LEFT_OUT}
            self._sender.send({"version": 1, "event": event.name, "level": event.level, "time": time.time(), **fields})

    @hookimpl(trylast=True)
    def canary_settle(self, canary: "Canary", last: bool) -> None:
        """At the end, and before a finding stops the engine, waits for deliveries."""
        if self._sender is not None and (last or canary.mode == "raise"):
            self._sender.finish(LAST_S)
