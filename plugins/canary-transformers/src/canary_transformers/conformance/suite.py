"""`ContinuousConformance`: the suite of ``canary check-plugin transformers``."""

from collections.abc import Mapping
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
        "lengths",
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
_OF_PREFIXES: frozenset[Ability] = frozenset({"prefix_cache", "park", "evict", "names", "weights"})
_LACKING: dict[Ability, str] = {
    "roll_back": "continuous batching rolls no request back",
    "identities": "continuous batching has no key beside the tokens: one adapter at a time, and no salts",
    "contents": "continuous batching takes tokens only",
}


class ContinuousConformance(PluginConformance):
    """Continuous batching of a model with full attention."""

    plugin = plugin
    layers, halves = LAYERS, HALVES
    abilities = _ABILITIES | _OF_POOL if HAS_POOL else _ABILITIES
    lacking: Mapping[Ability, str] = (
        _LACKING if HAS_POOL else {**_LACKING, **dict.fromkeys(_OF_POOL, "this release has no pool of blocks")}
    )
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

    abilities = ContinuousConformance.abilities - _OF_PREFIXES
    lacking: Mapping[Ability, str] = {
        **ContinuousConformance.lacking,
        **dict.fromkeys(_OF_PREFIXES, "prefixes are not shared beside windows"),
    }
    model: ModelName = "gemma3"
