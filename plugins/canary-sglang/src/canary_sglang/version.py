"""The version of canary-sglang, and the supported versions of SGLang."""

from canary_core import EngineInfo

__version__ = "0.1.0"

SUPPORTED = ">=0.5.14,<0.5.24"
"""Releases whose pools, batches and hooked functions were read; docs/evidence.md names those also run."""


def engine() -> EngineInfo:
    """The installed SGLang, without importing it."""
    return EngineInfo.of("sglang", SUPPORTED)
