"""Tools for tests of a plugin: the conformance suite, faults, a collector of findings, and the interface of ``canary
demo``."""

from canary_core.config.faults import FaultSpec
from canary_kit.conformance import (
    ABILITIES,
    Ability,
    EngineSession,
    Nonconforming,
    Outcome,
    PluginConformance,
    run_suite,
    suite_tests,
)
from canary_kit.engines import NEW_TOKENS, PROMPT_TOKENS, TOKENS, DemoEngine, Job, Served
from canary_kit.faults.catalogue import FAULTS
from canary_kit.faults.injector import FaultInjector
from canary_kit.faults.scene import read_bytes, write_bytes
from canary_kit.findings import Findings
from canary_kit.oracle import TokenOracle
from canary_kit.quiet import one_thread

__all__ = [
    "ABILITIES",
    "FAULTS",
    "NEW_TOKENS",
    "PROMPT_TOKENS",
    "TOKENS",
    "Ability",
    "DemoEngine",
    "EngineSession",
    "FaultInjector",
    "FaultSpec",
    "Findings",
    "Job",
    "Nonconforming",
    "Outcome",
    "PluginConformance",
    "Served",
    "TokenOracle",
    "one_thread",
    "read_bytes",
    "run_suite",
    "suite_tests",
    "write_bytes",
]
