"""The plugin ``sglang``, which ``CANARY_PLUGINS=sglang`` turns on. Importing this module does not import SGLang."""

from collections.abc import Sequence

from canary_core import CanaryConfig, CanaryError, EngineInfo, Event, HookTarget, emit, hookimpl, start_plugins
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
    config: CanaryConfig | None = None
    try:
        config = CanaryConfig.load()
        if "sglang" in config.plugins:
            start_plugins(config)
    except CanaryError as error:
        if config is None:
            emit(Event("start_failed", "error", {"error": str(error)}))
        elif config.mode == "raise":
            raise SystemExit(f"canary: {error}") from error
        raise


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
