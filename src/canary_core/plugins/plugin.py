"""What is known of a plugin (`Plugin`) and of the engine it is for (`EngineInfo`)."""

from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine a plugin is for. ``version`` is the installed one, None if the engine isn't installed;
    ``supported_range`` is the text shown to users, e.g. ``>=5.17,<6``."""

    name: str
    version: str | None
    supported_range: str
    supported: bool

    @classmethod
    def of(cls, distribution: str, supported_range: str) -> "EngineInfo":
        """Looks the installed version up without importing the engine. ``supported_range`` is a PEP 440 specifier;
        release candidates inside of it count as supported."""
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return cls(distribution, None, supported_range, supported=False)
        fits = SpecifierSet(supported_range).contains(version, prereleases=True)
        return cls(distribution, version, supported_range, supported=fits)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin as found: where it comes from, what it implements, or why it can't be used (``error``)."""

    name: str
    distribution: str | None = None
    version: str | None = None
    hooks: tuple[str, ...] = ()
    engine: EngineInfo | None = None
    error: str | None = None
    built_in: bool = False
    """Part of Canary itself, and so on without being named in ``CANARY_PLUGINS``."""
    target: Any = field(default=None, repr=False, compare=False)
    """The object with the hook implementations; None if it could not be loaded."""


def refusal(plugin: Plugin) -> str | None:
    """Why the plugin's engine can't be hooked, None if it can."""
    engine = plugin.engine
    if engine is None or engine.supported:
        return None
    fix = f"install {engine.name}{engine.supported_range} or a release of {plugin.distribution} that supports it"
    if engine.version is None:
        return f"plugin {plugin.name!r} supports {engine.name} {engine.supported_range}, which is not installed; {fix}"
    return (
        f"plugin {plugin.name!r} supports {engine.name} {engine.supported_range}, got {engine.name} {engine.version}; "
        f"{fix}"
    )


def error_text(error: BaseException) -> str:
    """``KeyError: 'forward'``: an exception in a sentence."""
    return f"{type(error).__name__}: {error}"
