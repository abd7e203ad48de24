"""Hands events to plugins. `canary_core.plugins` says which plugins are this process's."""

from collections.abc import Callable
from typing import Any

import pluggy

from canary_core.errors import error_text
from canary_core.events import Event

REPORTING = "reporting"
"""The built-in plugin that is told first, and of other plugins' failures."""

_served: list[tuple[Callable[[], pluggy.PluginManager], Callable[[], Any]]] = []


def serve(manager: Callable[[], pluggy.PluginManager], reporting: Callable[[], Any]) -> None:
    """Sets who gives this process's manager, and a new object of built-in reporting."""
    _served[:] = [(manager, reporting)]


def hook_manager() -> pluggy.PluginManager:
    """The pluggy manager of this process."""
    return _served[0][0]()


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
        reporting = manager.get_plugin(REPORTING) or _served[0][1]()
        reporting.canary_event(event=failed)
