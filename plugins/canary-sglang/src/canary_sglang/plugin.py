"""The plugin ``sglang``, turned on by ``CANARY_PLUGINS=sglang``. Importing the module does not import SGLang."""

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
    """Called by SGLang's plugin loader in each process. Does nothing unless ``CANARY_PLUGINS`` names ``sglang``. A
    second call changes nothing.

    SGLang only logs exceptions of its plugins: right in log mode. In raise mode the process must not run unguarded, so
    `SystemExit` is raised instead.
    """
    start_plugins_for("sglang")


@hookimpl
def canary_engine() -> EngineInfo:
    """The installed SGLang, and the supported releases."""
    return version.engine()


@hookimpl
def canary_targets() -> Sequence[HookTarget]:
    """Functions hooked in every engine."""
    return targets.hook_targets()


@hookimpl
def canary_install(config: CanaryConfig) -> None:
    """Guards engines built by the process."""
    HOOKS.start(config)


@hookimpl
def canary_uninstall() -> None:
    """Undoes `canary_install`: closes all sessions."""
    HOOKS.stop()


@hookimpl
def canary_conformance() -> NoReturn:
    """Raises `PluginError`: the suite is among the tests, since it needs an SGLang for CPUs."""
    raise PluginError(
        "the conformance suite of canary-sglang starts many small engines on a CPU, for which SGLang needs an "
        "environment of its own, so it is among the tests. In a checkout of the repository run: make test-sglang "
        "PYTEST_FLAGS='-k test_conformance' (with SGLANG=0.5.17 for that release). To check the plugin against the "
        "engine that you run, set CANARY_AUDIT=8 there"
    )
