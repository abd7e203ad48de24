"""Our version, and which versions of Transformers we know."""

from canary_core import EngineInfo, PluginError

__version__ = "0.1.0"

SUPPORTED = ">=5.17,<5.24"
"""Releases whose continuous batching and caches were read and run; `continuous.compat` says how they differ."""


def engine() -> EngineInfo:
    """The installed Transformers, without importing it."""
    return EngineInfo.of("transformers", SUPPORTED)


def require_supported() -> None:
    """Raises `PluginError`, naming version and range, unless a supported Transformers is installed."""
    found = engine()
    if not found.supported:
        have = f"found {found.version}" if found.version else "found none"
        raise PluginError(
            f"canary-transformers {__version__} supports transformers {SUPPORTED}, {have}; install a release in that "
            f"range (pip install 'canary-transformers[engine]') or a canary-transformers that supports yours"
        )
