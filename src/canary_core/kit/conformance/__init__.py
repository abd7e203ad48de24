"""The conformance suite: requirements for an engine's plugin, proven from outside of its adapter."""

from canary_core.kit.conformance.outcome import Outcome, run_suite, suite_tests
from canary_core.kit.conformance.problems import Nonconforming
from canary_core.kit.conformance.session import ABILITIES, Ability, EngineSession
from canary_core.kit.conformance.suite import PluginConformance

__all__ = [
    "ABILITIES",
    "Ability",
    "EngineSession",
    "Nonconforming",
    "Outcome",
    "PluginConformance",
    "run_suite",
    "suite_tests",
]
