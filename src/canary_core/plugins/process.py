"""The plugins of this process: functions for engines' own plugin loaders, the ``canary`` command and plugins."""

from collections.abc import Iterable
from threading import RLock
from typing import Any

import pluggy

from canary_core.config import CanaryConfig
from canary_core.config.shown import unknown_variables
from canary_core.errors import CanaryError, PluginError
from canary_core.plugins.discovery import as_installed, built_in, entry_points, not_installed
from canary_core.plugins.engine import EngineInfo
from canary_core.plugins.plugin import Plugin
from canary_core.plugins.registry import Plugins
from canary_core.plugins.targets import HookTarget
from canary_core.runtime.telling import REPORTING

_process: Plugins | None = None
_process_lock = RLock()


def _plugins() -> Plugins:
    """The process's `Plugins`, made at the first call."""
    global _process
    with _process_lock:
        if _process is None:
            _process = Plugins()
        return _process


def process_manager() -> pluggy.PluginManager:
    """As `canary_core.hook_manager`."""
    return _plugins().manager


def private_hooks(*own: object) -> pluggy.PluginManager:
    """A private manager: the present plugins of this process, built-in reporting of its own, and ``own``, which receive
    only calls about a `Canary` with this manager."""
    private = _plugins().another_manager()
    for name, plugin in process_manager().list_name_plugin():
        if plugin is not None and not private.has_plugin(name):
            private.register(plugin, name)
    for plugin in own:
        private.register(plugin)
    return private


def load(config: CanaryConfig | None = None) -> tuple[Plugin, ...]:
    """`Plugins.load` for this process; without ``config``, by the environment."""
    return _plugins().load(config or CanaryConfig.load())


def install(config: CanaryConfig | None = None) -> tuple[Plugin, ...]:
    """`Plugins.install` for this process; without ``config``, by the environment."""
    return _plugins().install(config or CanaryConfig.load())


def uninstall() -> None:
    """`Plugins.uninstall` for this process."""
    _plugins().uninstall()


def start(config: CanaryConfig | None = None) -> tuple[Plugin, ...]:
    """Loads and installs the plugins allowed by ``CANARY_PLUGINS``: to be called by an engine's own plugin loader.
    Cheap without any; a second call changes nothing. Reports variables that look like settings, too.

    Raises `ConfigError` or `PluginError`, after a ``start_failed`` event, since engines swallow their plugins'
    exceptions. In raise mode a plugin that could not be loaded or installed is such an error too: a test meant to run
    guarded must not pass unguarded.
    """
    try:
        config = config or CanaryConfig.load()
        _plugins().load(config)
        _plugins().tell_unknown_settings()
        started = _plugins().install(config)
        errors = [p.error for p in started if p.error is not None]
        if errors and config.mode == "raise":
            raise PluginError("; ".join(errors))
        return started
    except CanaryError as error:
        _plugins().tell_failed_start(str(error), config)
        raise


def start_for(plugin: str) -> None:
    """`start`, if ``CANARY_PLUGINS`` names ``plugin``, in any case: for the plugin's own function called by an engine's
    plugin loader in each process. A second call changes nothing, and reports nothing again.

    Otherwise another engine's plugin is meant. But a name without an installed plugin would leave this engine unguarded
    in silence, so it is the same error as in `start`; and a misspelt variable, such as ``CANARY_PLUGIN``, is an
    ``unknown_setting`` event.

    Raises `CanaryError` after a ``start_failed`` event. In raise mode the process must not run unguarded, though
    engines log and swallow their plugins' exceptions: so it raises `SystemExit` instead.
    """
    config: CanaryConfig | None = None
    try:
        config = CanaryConfig.load()
        if not config.plugins:
            if any(unknown_variables().values()):
                tell_unknown_settings(config, only_near=True)
        elif plugin in as_installed(config.plugins, [plugin]) or not_installed(config.plugins, entry_points()):
            start(config)
    except CanaryError as error:
        _plugins().tell_failed_start(str(error), config)
        if (config or CanaryConfig.readable()).mode == "raise":
            raise SystemExit(f"canary: {error}") from error
        raise


def require_engine(
    plugin: str, engine: EngineInfo, targets: Iterable[HookTarget | str], config: CanaryConfig
) -> CanaryConfig:
    """The checks of `install` before `canary_install`, for a plugin's own ways to guard an engine. Returns the settings
    to guard the engine with: ``config``, or for an engine newer than tested its `CanaryConfig.for_untested_engine`,
    after an ``untested_engine`` event, once for each version. ``plugin``: name of the plugin's distribution, for
    sentences. In mode off only the version is checked; ``targets`` is not read, so reading it may import the engine.

    Raises `PluginError` if the version is refused, or naming each missing one of ``targets``.
    """
    return _plugins().require_engine(Plugin(plugin, plugin, engine=engine), targets, config)


def tell_unknown_settings(config: CanaryConfig, only_near: bool = False) -> None:
    """`Plugins.tell_unknown_settings` for this process, in the format and from the level of ``config``."""
    _plugins().load(config.model_copy(update={"plugins": ()}))
    _plugins().tell_unknown_settings(only_near)


def new_reporting() -> Any:
    """Another object of built-in reporting."""
    return next(plugin.target for plugin in built_in() if plugin.name == REPORTING)
