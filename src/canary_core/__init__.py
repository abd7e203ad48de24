"""Canary: AddressSanitizer for the KV cache of an LLM engine. This is the whole public surface."""

from canary_core.adapters import BatchAdapter, PoolAdapter
from canary_core.batch import BatchView, SlotTable
from canary_core.canary import Canary
from canary_core.config import CanaryConfig
from canary_core.errors import AttachError, CanaryError, ConfigError, PluginError, ViolationError
from canary_core.events import Event
from canary_core.hookspecs import hookimpl
from canary_core.ops.payload import PayloadCheck, PayloadLayout, check_payload, fingerprint_bytes
from canary_core.plugins import EngineInfo
from canary_core.records import Kind, Phase, State
from canary_core.region import KVSource, Region, RegionKind, Role, Uncovered
from canary_core.violation import Violation
from canary_core.writers import Writers

__version__ = "0.1.0"

__all__ = [
    "AttachError",
    "BatchAdapter",
    "BatchView",
    "Canary",
    "CanaryConfig",
    "CanaryError",
    "ConfigError",
    "EngineInfo",
    "Event",
    "KVSource",
    "Kind",
    "PayloadCheck",
    "PayloadLayout",
    "Phase",
    "PluginError",
    "PoolAdapter",
    "Region",
    "RegionKind",
    "Role",
    "SlotTable",
    "State",
    "Uncovered",
    "Violation",
    "ViolationError",
    "Writers",
    "__version__",
    "check_payload",
    "fingerprint_bytes",
    "hookimpl",
]
