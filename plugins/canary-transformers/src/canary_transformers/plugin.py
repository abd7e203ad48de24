"""The plugin ``transformers``: what ``CANARY_PLUGINS=transformers`` turns on. Importing it imports no engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from canary_core import CanaryConfig, EngineInfo, HookTarget, hookimpl
from canary_core.testing import DemoEngine
from canary_transformers import targets, version
from canary_transformers.guard import Guard

if TYPE_CHECKING:
    from canary_core.testing import PluginConformance

CANARY_PROTOCOL = 1

_guard: Guard | None = None


@hookimpl
def canary_engine() -> EngineInfo:
    """The installed Transformers, and the releases that are supported."""
    return version.engine()


@hookimpl
def canary_targets() -> Sequence[HookTarget]:
    """What is hooked for the whole process."""
    return targets.TARGETS


@hookimpl
def canary_install(config: CanaryConfig) -> None:
    """Guards every model of this process."""
    global _guard
    if _guard is None:
        _guard = Guard(None, config)


@hookimpl
def canary_uninstall() -> None:
    """Ends what `canary_install` began."""
    global _guard
    if _guard is not None:
        _guard.close()
        _guard = None


@hookimpl
def canary_demo() -> DemoEngine:
    """Tiny models on continuous batching."""
    from canary_transformers.demo import TransformersDemo

    return TransformersDemo()


@hookimpl
def canary_conformance() -> "type[PluginConformance]":
    """What ``canary check-plugin transformers`` runs: continuous batching."""
    from canary_transformers.conformance import ContinuousConformance

    return ContinuousConformance
