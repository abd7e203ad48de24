"""The version of canary-transformers, and the known versions of Transformers."""

from canary_core import CanaryConfig, EngineInfo, require_engine
from canary_transformers import targets

__version__ = "0.1.0"

SUPPORTED = ">=5.17,<5.25"
"""Releases whose continuous batching and caches were read and run; `continuous.compat` has their differences."""


def engine() -> EngineInfo:
    """The installed Transformers, without importing it."""
    return EngineInfo.of("transformers", SUPPORTED)


def require_fit(config: CanaryConfig) -> CanaryConfig:
    """The settings to guard the installed Transformers with; see `require_engine`. Raises `PluginError`, with the
    reason, if it must not be hooked."""
    return require_engine("canary-transformers", engine(), targets.TARGETS, config)
