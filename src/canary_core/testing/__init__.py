"""What authors of plugins test theirs with: faults, a collector of findings, and what ``canary demo`` asks of an
engine."""

from canary_core.faults.catalogue import FAULTS
from canary_core.faults.injector import FaultInjector
from canary_core.faults.scene import read_bytes, write_bytes
from canary_core.faults.spec import FaultSpec
from canary_core.testing.engines import NEW_TOKENS, PROMPT_TOKENS, TOKENS, DemoEngine, Job, Served
from canary_core.testing.findings import Findings

__all__ = [
    "FAULTS",
    "NEW_TOKENS",
    "PROMPT_TOKENS",
    "TOKENS",
    "DemoEngine",
    "FaultInjector",
    "FaultSpec",
    "Findings",
    "Job",
    "Served",
    "read_bytes",
    "write_bytes",
]
