"""`Plugin`: facts about one plugin."""

from dataclasses import dataclass, field
from typing import Any

from canary_core.config import Untested
from canary_core.plugins.engine import EngineInfo


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin as found: its origin, its hooks, or why it can't be used (``error``)."""

    name: str
    distribution: str | None = None
    version: str | None = None
    hooks: tuple[str, ...] = ()
    engine: EngineInfo | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()
    """Missing parts, in sentences; the plugin is used all the same."""
    protocol: int | None = None
    """The plugin's ``CANARY_PROTOCOL``; None if not declared, which counts as 1."""
    built_in: bool = False
    """Part of Canary itself, and so on without being named in ``CANARY_PLUGINS``."""
    target: Any = field(default=None, repr=False, compare=False)
    """The object with the hook implementations; None if loading failed."""


def refusal(plugin: Plugin, untested: Untested = "guard") -> str | None:
    """Why the plugin's engine can't be hooked, None if it can, judging by the version. ``untested``: the setting."""
    if plugin.engine is None:
        return None
    return plugin.engine.refusal(f"plugin {plugin.name!r}", plugin.distribution, untested)
