"""The conformance suite: requirements for an engine's plugin, proven from outside of its adapter."""

from canary_kit.conformance.outcome import Outcome, run_suite, suite_tests
from canary_kit.conformance.problems import Nonconforming
from canary_kit.conformance.session import ABILITIES, Ability, EngineSession
from canary_kit.conformance.suite import PluginConformance

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
