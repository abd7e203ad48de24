"""Sweeps: what a prefix cache says that its slots hold, against what Canary remembers of them."""

from canary_core.watchers.prefix_cache.runs import CachedRun, FreeList
from canary_core.watchers.prefix_cache.sweep import RecordSweep, SweepResult

__all__ = ["CachedRun", "FreeList", "RecordSweep", "SweepResult"]
