"""The plugin ``vllm``, turned on by ``CANARY_PLUGINS=vllm``. Importing the module does not import vLLM."""

import contextlib
from collections.abc import Sequence
from typing import NoReturn

from canary_core import (
    CanaryConfig,
    CanaryError,
    EngineInfo,
    HookTarget,
    PluginError,
    hookimpl,
    start_plugins_for,
)
from canary_vllm import version
from canary_vllm.compat import targets
from canary_vllm.hooks import HOOKS

CANARY_PROTOCOL = 1


def start() -> None:
    """vLLM's plugin loader calls it in each process: the front end, the engine core, each worker. vLLM does not start
    if a plugin raises, so in log mode the reason is only told; see `start_plugins_for`."""
    with contextlib.suppress(CanaryError):
        start_plugins_for("vllm")


@hookimpl
def canary_engine() -> EngineInfo:
    """The installed vLLM, and the supported releases."""
    return version.engine()


@hookimpl
def canary_targets() -> Sequence[HookTarget]:
    """Functions hooked in every engine."""
    return targets.hook_targets()


@hookimpl
def canary_install(config: CanaryConfig) -> None:
    """Guards engines built by this process."""
    HOOKS.start(config)


@hookimpl
def canary_uninstall() -> None:
    """Undoes `canary_install`: closes all sessions, and restores vLLM's functions."""
    HOOKS.stop()


@hookimpl
def canary_conformance() -> NoReturn:
    """Raises `PluginError`: the suite is among the tests, since it needs a vLLM for CPUs."""
    raise PluginError(
        "the conformance suite of canary-vllm is among the tests, since vLLM for CPUs needs an environment of its own. "
        "In a checkout of the repository run: make test-vllm PYTEST_FLAGS='-k test_conformance'. To check the plugin "
        "against the engine that you run, set CANARY_AUDIT=8 there"
    )
