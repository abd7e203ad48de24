"""The version of canary-sglang, and the versions of SGLang that it supports."""

from canary_core import EngineInfo

__version__ = "0.1.0"

SUPPORTED = ">=0.5.14,<0.5.24"
"""Releases whose pools, batches and hooked functions were read; docs/evidence.md says which ones were run."""


def engine() -> EngineInfo:
    """The installed SGLang, without importing it."""
    return EngineInfo.of("sglang", SUPPORTED)
