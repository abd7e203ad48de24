"""Hands events to plugins, those of this process by default; `Untold` counts in place of events that are too many."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module

import pluggy

from canary_core.errors import error_text
from canary_core.events import Event

REPORTING = "reporting"
"""The built-in plugin that is told first, and of other plugins' failures."""

PLUGINS = "canary_core.plugins"
"""Loads plugins; by its name, since guarding knows nothing of how that is done."""

UNTOLD_S = 60.0
"""Least seconds between two events of one `Untold`."""


def hook_manager() -> pluggy.PluginManager:
    """The pluggy manager of this process, with the built-in plugins and whatever was loaded. Register an object with
    hook implementations in it to hear of every `Canary` that has no manager of its own."""
    manager: pluggy.PluginManager = import_module(PLUGINS).process_manager()
    return manager


def emit(event: Event, hooks: pluggy.PluginManager | None = None) -> None:
    """Hands ``event`` to every plugin's `canary_event`, this process's by default. Built-in reporting comes first. An
    exception of another plugin is a ``reporting_failed`` event, which only built-in reporting sees, and goes no
    further."""
    manager = hook_manager() if hooks is None else hooks
    try:
        manager.hook.canary_event(event=event)
    except Exception as error:
        failed = Event("reporting_failed", "error", {"while_reporting": event.name, "error": error_text(error)})
        # A manager may be without it, where somebody took it out; the failure is told all the same.
        reporting = manager.get_plugin(REPORTING) or import_module(PLUGINS).new_reporting()
        reporting.canary_event(event=failed)


def suspect(request: str, reason: str) -> None:
    """Has a running ``request`` verified for ``reason``, such as NaN logits or a complaint: see `canary_suspect`. For
    any thread of the engine's process; never waits."""
    hook_manager().hook.canary_suspect(request=request, reason=reason)


class Untold:
    """Things counted in place of an event each: one ``event`` with all counts since the last, at most once in
    `UNTOLD_S`. The watch looks at it, also while the engine idles, and the end of a Canary tells the rest. ``unit``:
    name of the field with their number. Called from any thread."""

    def __init__(self, tell: Callable[[Event], None], event: Event, unit: str) -> None:
        self._tell = tell
        self._event = event
        self._unit = unit
        self._lock = threading.Lock()
        self._fields: dict[str, object] = {}
        self._kinds: dict[str, int] = {}
        self.waiting = 0
        """How many wait to be told."""
        self._told: float | None = None
        self.total = 0
        """All of them so far."""

    def add(self, kinds: Mapping[str, int] | None = None, number: int = 1, at: int | None = None) -> None:
        """``number`` more, with findings by ``kinds``; ``at``: number of the thing, if it has one."""
        with self._lock:
            self.waiting += number
            self.total += number
            for kind, findings in (kinds or {}).items():
                self._kinds[kind] = self._kinds.get(kind, 0) + findings
            if at is not None:
                self._fields.setdefault("first", at)
                self._fields["last"] = at

    def look(self, now: float) -> None:
        """Tells what waits, unless it told something a short while ago. ``now``: `time.monotonic`."""
        if self.waiting and (self._told is None or now - self._told >= UNTOLD_S):
            self.tell()

    def tell(self) -> None:
        """Tells what waits, if anything does."""
        with self._lock:
            number, self.waiting = self.waiting, 0
            fields, self._fields = self._fields, {}
            kinds, self._kinds = self._kinds, {}
            if not number:
                return
            self._told = time.monotonic()
        by_kind = {"kinds": kinds} if kinds else {}
        about = {self._unit: number, **fields, **by_kind, **self._event.fields}
        self._tell(replace(self._event, fields=about))
