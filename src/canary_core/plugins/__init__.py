"""Finds, loads and installs plugins: `start` is all that an engine's own plugin loader needs to call."""

from canary_core.plugins.registry import (
    EngineInfo,
    Plugin,
    Plugins,
    emit,
    install,
    installed,
    load,
    manager,
    process,
    refusal,
    start,
    uninstall,
)

__all__ = [
    "EngineInfo",
    "Plugin",
    "Plugins",
    "emit",
    "install",
    "installed",
    "load",
    "manager",
    "process",
    "refusal",
    "start",
    "uninstall",
]
