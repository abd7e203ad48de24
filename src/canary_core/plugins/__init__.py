"""Finds, loads and installs plugins: an engine's own plugin loader only needs to call `start`.

A plugin is an object (usually a module) with hook implementations, declared as an entry point of the group ``canary``;
for a class, each manager makes its own object. Canary's own reporting and faults are such plugins.
"""

from canary_core.plugins.discovery import as_installed, installed, not_installed
from canary_core.plugins.engine import EngineInfo
from canary_core.plugins.plugin import Plugin, refusal
from canary_core.plugins.process import (
    install,
    load,
    new_reporting,
    private_hooks,
    process_manager,
    require_engine,
    start,
    start_for,
    tell_unknown_settings,
    uninstall,
)
from canary_core.plugins.registry import Plugins
from canary_core.plugins.targets import HookTarget
from canary_core.runtime.telling import emit, hook_manager

__all__ = [
    "EngineInfo",
    "HookTarget",
    "Plugin",
    "Plugins",
    "as_installed",
    "emit",
    "hook_manager",
    "install",
    "installed",
    "load",
    "new_reporting",
    "not_installed",
    "private_hooks",
    "process_manager",
    "refusal",
    "require_engine",
    "start",
    "start_for",
    "tell_unknown_settings",
    "uninstall",
]
