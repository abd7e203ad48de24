"""Sweeps: a prefix cache's claims about its slots, against Canary's records."""

from canary_core.watchers.prefix_cache.runs import CachedRun, FreeList
from canary_core.watchers.prefix_cache.sweep import RecordSweep, SweepResult

__all__ = ["CachedRun", "FreeList", "RecordSweep", "SweepResult"]
