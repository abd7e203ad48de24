"""The plugin ``transformers``, turned on by ``CANARY_PLUGINS=transformers``. Importing it imports no engine."""

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
    """The installed Transformers, and the supported releases."""
    return version.engine()


@hookimpl
def canary_targets() -> Sequence[HookTarget]:
    """Functions hooked for the whole process."""
    return targets.TARGETS


@hookimpl
def canary_install(config: CanaryConfig) -> None:
    """Guards every model of the process."""
    global _guard
    if _guard is None:
        _guard = Guard(None, config)


@hookimpl
def canary_uninstall() -> None:
    """Ends the guard of `canary_install`."""
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
    """The suite of ``canary check-plugin transformers``: continuous batching."""
    from canary_transformers.conformance import ContinuousConformance

    return ContinuousConformance
