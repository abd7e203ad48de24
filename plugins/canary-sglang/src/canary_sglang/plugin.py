"""The plugin ``sglang``: what ``CANARY_PLUGINS=sglang`` turns on. Importing it imports no engine."""

from canary_core import CanaryConfig, CanaryError, EngineInfo, Event, emit, hookimpl, start_plugins
from canary_sglang import version
from canary_sglang.hooks import HOOKS


def start() -> None:
    """What SGLang's plugin loader calls, in each process. Does nothing unless ``CANARY_PLUGINS`` names ``sglang``;
    again: changes nothing.

    SGLang logs and swallows what its plugins raise. In log mode that is right; in raise mode the process must not run
    unguarded, so it ends with `SystemExit`.
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
    """SGLang, and the range that `layout` knows."""
    return version.engine()


@hookimpl
def canary_install(config: CanaryConfig) -> None:
    """Guards the engine that this process builds."""
    HOOKS.start(config)


@hookimpl
def canary_uninstall() -> None:
    """Ends what `canary_install` began."""
    HOOKS.stop()
