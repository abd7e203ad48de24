"""Canary: AddressSanitizer for the KV cache of an LLM engine. The whole public surface."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from canary_core.batch import BatchView, SlotTable, StateCheckpoints
from canary_core.config import CanaryConfig
from canary_core.errors import AttachError, CanaryError, ConfigError, MisuseError, PluginError, ViolationError
from canary_core.events import Event, Level
from canary_core.guard.attach import attach, report_unguarded
from canary_core.guard.canary import Canary
from canary_core.guard.listener import StepListener
from canary_core.guard.sampling import SampledTokens
from canary_core.guard.slots import SlotEvents
from canary_core.guard.step import Step
from canary_core.incident import Incident
from canary_core.overlap import Overlap
from canary_core.records import Kind, Phase, State
from canary_core.region import KVSource, Placement, Region, RegionKind, Role, Uncovered
from canary_core.runtime.host_copy import HostCopy
from canary_core.runtime.streams import StreamSet
from canary_core.runtime.telling import emit, hook_manager, suspect
from canary_core.runtime.watchdog import Watchdog
from canary_core.runtime.witness import Witness
from canary_core.runtime.writers import Writers
from canary_core.violation import Violation

if TYPE_CHECKING:
    from canary_core.adapters import BatchAdapter, PoolAdapter
    from canary_core.attention import Attended, AttentionObserver, AttentionRule
    from canary_core.ops.payload import (
        PayloadCheck,
        PayloadLayout,
        PayloadRecords,
        check_payload,
        fingerprint_bytes,
    )
    from canary_core.ops.record_buffers import RecordBuffers
    from canary_core.patches import Patches
    from canary_core.plugins import EngineInfo, HookTarget, private_hooks, require_engine
    from canary_core.plugins import start as start_plugins
    from canary_core.plugins import start_for as start_plugins_for
    from canary_core.plugins.hookspecs import PROTOCOL, hookimpl
    from canary_core.read_table import ReadLens, ReadTable
    from canary_core.recomputer import CachedRequest, Computed, Outline, Recomputer, Touch, may_recompute
    from canary_core.runtime.contents import Contents
    from canary_core.verdict import Verdict
    from canary_core.watchers.audit.footprint import Footprint, FootprintAudit
    from canary_core.watchers.audit.memory import tensors_of
    from canary_core.watchers.ledger import Arrival, Ledger, Origin, block_hashes
    from canary_core.watchers.prefix_cache import CachedRun, FreeList, RecordSweep, SweepResult
    from canary_core.watchers.ranks.group import RankGroup
    from canary_core.watchers.recompute import (
        AttentionError,
        LayerError,
        Questions,
        Recompute,
        RecomputeJudge,
        Verification,
        Verifier,
    )

__version__ = "0.1.0"

__all__ = [
    "PROTOCOL",
    "Arrival",
    "AttachError",
    "Attended",
    "AttentionError",
    "AttentionObserver",
    "AttentionRule",
    "BatchAdapter",
    "BatchView",
    "CachedRequest",
    "CachedRun",
    "Canary",
    "CanaryConfig",
    "CanaryError",
    "Computed",
    "ConfigError",
    "Contents",
    "EngineInfo",
    "Event",
    "Footprint",
    "FootprintAudit",
    "FreeList",
    "HookTarget",
    "HostCopy",
    "Incident",
    "KVSource",
    "Kind",
    "LayerError",
    "Ledger",
    "Level",
    "MisuseError",
    "Origin",
    "Outline",
    "Overlap",
    "Patches",
    "PayloadCheck",
    "PayloadLayout",
    "PayloadRecords",
    "Phase",
    "Placement",
    "PluginError",
    "PoolAdapter",
    "Questions",
    "RankGroup",
    "ReadLens",
    "ReadTable",
    "Recompute",
    "RecomputeJudge",
    "Recomputer",
    "RecordBuffers",
    "RecordSweep",
    "Region",
    "RegionKind",
    "Role",
    "SampledTokens",
    "SlotEvents",
    "SlotTable",
    "State",
    "StateCheckpoints",
    "Step",
    "StepListener",
    "StreamSet",
    "SweepResult",
    "Touch",
    "Uncovered",
    "Verdict",
    "Verification",
    "Verifier",
    "Violation",
    "ViolationError",
    "Watchdog",
    "Witness",
    "Writers",
    "__version__",
    "attach",
    "block_hashes",
    "check_payload",
    "emit",
    "fingerprint_bytes",
    "hook_manager",
    "hookimpl",
    "may_recompute",
    "private_hooks",
    "report_unguarded",
    "require_engine",
    "start_plugins",
    "start_plugins_for",
    "suspect",
    "tensors_of",
]

_WHEN_ASKED = {
    "adapters": ("BatchAdapter", "PoolAdapter"),
    "attention": ("Attended", "AttentionObserver", "AttentionRule"),
    "ops.payload": ("PayloadCheck", "PayloadLayout", "PayloadRecords", "check_payload", "fingerprint_bytes"),
    "ops.record_buffers": ("RecordBuffers",),
    "patches": ("Patches",),
    "plugins": ("EngineInfo", "HookTarget", "private_hooks", "require_engine"),
    "plugins.hookspecs": ("PROTOCOL", "hookimpl"),
    "runtime.contents": ("Contents",),
    "read_table": ("ReadLens", "ReadTable"),
    "recomputer": ("CachedRequest", "Computed", "Outline", "Recomputer", "Touch", "may_recompute"),
    "verdict": ("Verdict",),
    "watchers.audit.footprint": ("Footprint", "FootprintAudit"),
    "watchers.ranks.group": ("RankGroup",),
    "watchers.audit.memory": ("tensors_of",),
    "watchers.ledger": ("Arrival", "Ledger", "Origin", "block_hashes"),
    "watchers.prefix_cache": ("CachedRun", "FreeList", "RecordSweep", "SweepResult"),
    "watchers.recompute": (
        "AttentionError",
        "LayerError",
        "Questions",
        "Recompute",
        "RecomputeJudge",
        "Verification",
        "Verifier",
    ),
}
"""Public names that not every engine needs, by the module that is loaded with the first use of one."""

_HOME = {name: (module, name) for module, names in _WHEN_ASKED.items() for name in names}
_HOME |= {"start_plugins": ("plugins", "start"), "start_plugins_for": ("plugins", "start_for")}


def __getattr__(name: str) -> Any:
    if name == "plugins":
        return import_module("canary_core.plugins")
    if name not in _HOME:
        raise AttributeError(f"module 'canary_core' has no attribute {name!r}")
    module, own = _HOME[name]
    found = globals()[name] = getattr(import_module(f"canary_core.{module}"), own)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
