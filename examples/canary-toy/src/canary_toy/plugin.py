"""The plugin ``toy``: what ``CANARY_PLUGINS=toy`` turns on. Importing it imports no engine."""

from typing import TYPE_CHECKING

from canary_core import CanaryConfig, EngineInfo, hookimpl

if TYPE_CHECKING:
    from canary_core.testing import PluginConformance

CANARY_PROTOCOL = 1
"""The version of Canary's hooks that this plugin was written for."""


@hookimpl
def canary_engine() -> EngineInfo:
    """The releases that this plugin was tested with. The toy engine is part of this very distribution; name yours."""
    return EngineInfo.of("canary-toy", ">=0.1,<0.2")


@hookimpl
def canary_install(config: CanaryConfig) -> None:
    """Guards every engine of this process that is made from now on."""
    from canary_toy.hooks import HOOKS

    HOOKS.install(config)


@hookimpl
def canary_uninstall() -> None:
    """Ends what `canary_install` began."""
    from canary_toy.hooks import HOOKS

    HOOKS.uninstall()


@hookimpl
def canary_conformance() -> "type[PluginConformance]":
    """What ``canary check-plugin toy`` runs."""
    from canary_toy.session import ToyConformance

    return ToyConformance
