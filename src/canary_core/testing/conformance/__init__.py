"""The conformance suite: what a plugin of an engine must pass, proven from outside of its adapter."""

from canary_core.testing.conformance.outcome import Outcome, run_suite, suite_tests
from canary_core.testing.conformance.problems import Nonconforming
from canary_core.testing.conformance.session import ABILITIES, Ability, EngineSession
from canary_core.testing.conformance.suite import PluginConformance

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
