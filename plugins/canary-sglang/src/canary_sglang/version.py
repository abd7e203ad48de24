"""Our version, and which versions of SGLang we know."""

from canary_core import EngineInfo

__version__ = "0.1.0"

SUPPORTED = ">=0.5.14,<0.5.24"
"""Releases whose pools, batches and hook targets were read; the README says which were run."""


def engine() -> EngineInfo:
    """The installed SGLang, without importing it."""
    return EngineInfo.of("sglang", SUPPORTED)
