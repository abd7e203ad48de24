"""Hands events to plugins, those of this process by default."""

from importlib import import_module

import pluggy

from canary_core.errors import error_text
from canary_core.events import Event

REPORTING = "reporting"
"""The built-in plugin that is told first, and of other plugins' failures."""

PLUGINS = "canary_core.plugins"
"""Loads plugins; by its name, since guarding knows nothing of how that is done."""


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
