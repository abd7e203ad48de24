"""The conformance suite on real SGLang, by name of a setup, and a process that runs it.

``python -m engines.conformance OPTIONS`` reads commands and answers them as `engines.driver` does; the only one is
``conform``, of one test.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from canary_sglang import plugin

from canary_core.testing import ABILITIES, Ability, EngineSession, PluginConformance
from canary_kit.conformance import run_suite
from engines.driver import begin, converse
from engines.session import SGLangSession
from engines.setups import SETUPS

LAYERS = 2
COMMON: frozenset[Ability] = frozenset(
    {"slot_mapping", "lifetime", "prefix_cache", "park", "evict", "preempt", "raise"}
)
"""Abilities tried with every kind of pool; the others are with MHA."""
LACKING: Mapping[Ability, str] = {
    "padding": "a batch is padded for CUDA graphs, which a CPU does not have",
    "graphs": "a CPU has no CUDA graphs",
    "fork": "SGLang runs each of several answers as a request of its own",
    "copies": "SGLang forks no requests",
    "roll_back": "SGLang rolls back only what a draft model proposed",
    "read_tables": "on a CPU attention reads the scheduler's own table",
    "contents": "the suite takes tokens only; tests/bugs/live/sglang_overrides_in_the_prefix_cache has embeddings",
    "uninstall": "what SGLang's HookRegistry has wrapped stays wrapped",
}
OTHER_POOLS: Mapping[Ability, str] = {**dict.fromkeys(set(ABILITIES) - COMMON, "tried with MHA"), **LACKING}
"""What another pool than MHA's lacks in the suite."""


class SGLangConformance(PluginConformance):
    """LLaMA: K and V of all tokens, slot by slot."""

    plugin = plugin
    layers, halves = LAYERS, ("k", "v")
    abilities = COMMON | {
        "token_ids", "positions", "lengths", "tables", "names", "sampled", "identities", "weights", "stores",
    }  # fmt: skip
    lacking: Mapping[Ability, str] = LACKING
    setup: ClassVar[str] = "mha"
    """One of `SETUPS`."""
    model: ClassVar[dict[str, Any]] = {"num_hidden_layers": LAYERS}
    """What is different about its model."""

    def session(self) -> EngineSession:
        """A new engine."""
        options = SETUPS[self.setup].options
        return SGLangSession(
            {"chunked_prefill_size": 24, **options, "json_model_override_args": json.dumps(self.model)}
        )


class Pages(SGLangConformance):
    """Pages of four slots."""

    setup = "pages"
    abilities, lacking = COMMON, OTHER_POOLS


class Fp8(SGLangConformance):
    """K and V of one byte an element."""

    setup = "fp8"
    abilities, lacking = COMMON, OTHER_POOLS


class Latent(SGLangConformance):
    """MLA: one row for K and V together."""

    setup, halves = "mla", ("kv",)
    abilities, lacking = COMMON, OTHER_POOLS


class Window(SGLangConformance):
    """Layers with a sliding window, whose slots are others than those of the full layers. The window is so long that a
    flipped bit is in it."""

    setup, layers = "swa", 4
    abilities = COMMON - {"park"}
    lacking: Mapping[Ability, str] = {**OTHER_POOLS, "park": "what only a cache with windows keeps is not followed"}
    model: ClassVar[dict[str, Any]] = {"sliding_window": 96}


SUITES = {suite.setup: suite for suite in (SGLangConformance, Pages, Fp8, Latent, Window)}


def main() -> None:
    """Serves commands until stdin ends."""
    options, answers = begin()
    suite = SUITES[options["suite"]]

    def conform(test: str) -> dict[str, Any]:
        (outcome,) = run_suite(suite, [test])
        return {**outcome.fields(), "error": outcome.error}

    converse(answers, lambda do, **arguments: {"conform": conform}[do](**arguments))


if __name__ == "__main__":
    main()
