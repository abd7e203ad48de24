"""`ContinuousConformance`: the suite of ``canary check-plugin transformers``."""

from dataclasses import fields

from transformers import ContinuousBatchingConfig

from canary_core.testing import FAULTS, Ability, EngineSession, PluginConformance
from canary_transformers import plugin
from canary_transformers.conformance.continuous import (
    HALVES,
    LAYERS,
    LONGEST_PROMPT,
    VOCABULARY,
    ContinuousSession,
    ModelName,
)
from canary_transformers.conformance.continuous_5_17 import ContinuousSession517

HAS_POOL = "page_size" in {f.name for f in fields(ContinuousBatchingConfig)}
"""From 5.18 on blocks come from a pool, and their holders can be followed."""

_ABILITIES: frozenset[Ability] = frozenset(
    {"slot_mapping", "padding", "prefix_cache", "preempt", "fork", "raise", "uninstall"}
)
_OF_POOL: frozenset[Ability] = frozenset(
    {
        "lifetime",
        "park",
        "evict",
        "token_ids",
        "positions",
        "tables",
        "names",
        "copies",
        "graphs",
        "sampled",
        "weights",
        "read_tables",
        "stores",
    }
)


class ContinuousConformance(PluginConformance):
    """Continuous batching of a model with full attention."""

    plugin = plugin
    layers, halves = LAYERS, HALVES
    abilities = _ABILITIES | _OF_POOL if HAS_POOL else _ABILITIES
    vocabulary, longest_prompt = VOCABULARY, LONGEST_PROMPT
    # On 5.17 a block's first write goes to memory that was never cleared, so that it may be lost unseen.
    faults = tuple(name for name in FAULTS if HAS_POOL or name != "lost_write")
    engine_package = "transformers"
    model: ModelName = "llama"

    def session(self) -> EngineSession:
        """A fresh manager with an empty cache."""
        return ContinuousSession(self.model) if HAS_POOL else ContinuousSession517(self.model)


class WindowConformance(ContinuousConformance):
    """Sliding windows beside full attention: two regions take turns on one memory, and prefixes are not shared."""

    abilities = ContinuousConformance.abilities - {"prefix_cache", "park", "evict", "names", "weights"}
    model: ModelName = "gemma3"
