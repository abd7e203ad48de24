"""The plugin ``sglang``, which ``CANARY_PLUGINS=sglang`` turns on. Importing this module does not import SGLang."""

from collections.abc import Sequence
from typing import NoReturn

from canary_core import (
    CanaryConfig,
    EngineInfo,
    HookTarget,
    PluginError,
    hookimpl,
    start_plugins_for,
)
from canary_sglang import version
from canary_sglang.compat import targets
from canary_sglang.hooks import HOOKS

CANARY_PROTOCOL = 1


def start() -> None:
    """SGLang's plugin loader calls it in each process. Does nothing unless ``CANARY_PLUGINS`` names ``sglang``. A
    second call changes nothing.

    SGLang only logs exceptions of its plugins. In log mode that is right. In raise mode the process must not run
    unguarded, so `SystemExit` is raised instead.
    """
    start_plugins_for("sglang")


@hookimpl
def canary_engine() -> EngineInfo:
    """The installed SGLang, and the releases that are supported."""
    return version.engine()


@hookimpl
def canary_targets() -> Sequence[HookTarget]:
    """What is hooked in every engine."""
    return targets.hook_targets()


@hookimpl
def canary_install(config: CanaryConfig) -> None:
    """Guards the engine that this process builds."""
    HOOKS.start(config)


@hookimpl
def canary_uninstall() -> None:
    """Undoes `canary_install`: closes all sessions."""
    HOOKS.stop()


@hookimpl
def canary_conformance() -> NoReturn:
    """Raises `PluginError`: the suite is among the tests, since it wants an SGLang that runs on a CPU."""
    raise PluginError(
        "the conformance suite of canary-sglang starts many small engines on a CPU, for which SGLang needs an "
        "environment of its own, so it is among the tests. In a checkout of the repository run: make test-sglang "
        "PYTEST_FLAGS='-k test_conformance' (with SGLANG=0.5.17 for that release). To check the plugin against the "
        "engine that you run, set CANARY_AUDIT=8 there"
    )
