"""`Plugins`: one pluggy manager and its loaded plugins."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from threading import RLock

import pluggy

from canary_core.config import CanaryConfig
from canary_core.config.shown import unknown_variables
from canary_core.errors import PluginError, ViolationError, error_text
from canary_core.events import Event
from canary_core.plugins.discovery import (
    as_installed,
    built_in,
    entry_points,
    inspect,
    new_manager,
    not_installed,
)
from canary_core.plugins.engine import EngineInfo
from canary_core.plugins.plugin import Plugin, refusal
from canary_core.plugins.targets import HookTarget, problems
from canary_core.runtime.telling import emit


class Plugins:
    """One pluggy manager, the built-in plugins, and loaded ones. Thread-safe. This process's own is behind `load`,
    `install` and `hook_manager`.

    `load` registers the plugins allowed by ``CANARY_PLUGINS``, `install` lets them hook their engines. One broken
    plugin is recorded with its error and takes nothing else down.
    """

    def __init__(self) -> None:
        self.manager = new_manager()
        self._lock = RLock()
        self._loaded: dict[str, Plugin] = {}
        self._hooked: list[str] = []
        self._unknown: set[str] = set()
        self._failures: set[str] = set()
        self._untested: set[tuple[str, str | None]] = set()
        self._built_in = built_in()
        for plugin in self._built_in:
            if plugin.error is not None:
                raise PluginError(plugin.error)
            self.manager.register(plugin.target, name=plugin.name)

    @property
    def loaded(self) -> tuple[Plugin, ...]:
        """Every plugin tried by `load`, in order, the failed ones included."""
        return tuple(self._loaded.values())

    def another_manager(self) -> pluggy.PluginManager:
        """A manager with built-in plugins of its own and nothing else. Quick: some engines get one for each cache, and
        nothing is looked for or examined a second time."""
        manager = new_manager()
        for plugin in self._built_in:
            manager.register(type(plugin.target)(), name=plugin.name)
        return manager

    def load(self, config: CanaryConfig) -> tuple[Plugin, ...]:
        """Registers the plugins that ``config.plugins`` names and returns all tried so far. A second call tries only
        new names. Tells all usable ones the settings (`canary_configure`), the built-in ones first. Ends with a
        ``plugin_incomplete`` event for each of `Plugin.warnings` and a ``plugins_loaded`` event if there was anything
        to try.

        Raises `PluginError`, before anything is loaded, if a name isn't installed; case does not matter. A plugin that
        is installed but broken does not raise: its `Plugin.error` says why, and the others are loaded.
        """
        with self._lock:
            for plugin in (*self._built_in, *(p for p in self.loaded if p.error is None)):
                self._configure(plugin, config)
            if not set(config.plugins) - self._loaded.keys():
                return self.loaded
            found = entry_points()
            missing = not_installed(config.plugins, found)
            if missing:
                raise PluginError("; ".join(str(p.error) for p in missing))
            names = [n for n in as_installed(config.plugins, found) if n not in self._loaded]
            if not names:
                return self.loaded
            for name in names:
                plugin = self._loaded[name] = inspect(name, found[name])
                if plugin.error is None:
                    self.manager.register(plugin.target, name=name)
                    self._configure(plugin, config)
            for name in names:
                plugin = self._loaded[name]
                for warning in plugin.warnings if plugin.error is None else ():
                    self.emit(Event("plugin_incomplete", "warning", {"plugin": name, "reason": warning}))
            self._tell("plugins_loaded", "loaded", [self._loaded[n] for n in names])
            return self.loaded

    def install(self, config: CanaryConfig) -> tuple[Plugin, ...]:
        """Calls `canary_install` of each loaded plugin once, after its engine's version was accepted and all of its
        `canary_targets` were found, and returns all plugins. In mode off nothing is installed. An engine newer than
        tested is an ``untested_engine`` event. Ends with a ``plugins_installed`` event.

        A plugin whose engine is missing, refused or lacks a target is refused, a raising one is undone: both are
        unregistered and keep the reason in `Plugin.error`. Never raises because of a plugin.
        """
        with self._lock:
            ready = [p for p in self.loaded if p.error is None and p.name not in self._hooked]
            if config.mode == "off" or not ready:
                return self.loaded
            for plugin in ready:
                error = self._install_one(plugin, config)
                if error is None:
                    self._hooked.append(plugin.name)
                else:
                    self._drop(plugin, error)
            self._tell("plugins_installed", "installed", [self._loaded[p.name] for p in ready])
            return self.loaded

    def uninstall(self) -> None:
        """Calls `canary_uninstall` of every installed plugin, last installed first. They stay loaded, so that `install`
        can follow. Ends with a ``plugins_uninstalled`` event; never raises because of a plugin.

        Raises `ViolationError`, after all are uninstalled, for the first finding of closing in raise mode.
        """
        with self._lock:
            if not self._hooked:
                return
            results = []
            found: ViolationError | None = None
            while self._hooked:
                plugin = self._loaded[self._hooked.pop()]
                try:
                    error = self._attempt(plugin, "canary_uninstall")
                except ViolationError as violation:
                    error, found = None, found or violation
                results.append(replace(plugin, error=error))
            self._tell("plugins_uninstalled", "uninstalled", results)
            if found is not None:
                raise found

    def require_engine(self, plugin: Plugin, targets: Iterable[HookTarget | str], config: CanaryConfig) -> CanaryConfig:
        """See `process.require_engine`; with the plugin as found."""
        refused = refusal(plugin, config.untested)
        if refused is not None:
            raise PluginError(refused)
        if config.mode == "off":
            return config
        missing = problems(targets)
        if missing:
            raise PluginError(_not_as_needed(plugin, missing))
        if plugin.engine is None or plugin.engine.status != "newer":
            return config
        config = config.for_untested_engine()
        self._tell_untested(plugin.name, plugin.engine, config.audit)
        return config

    def tell_failed_start(self, error: str, config: CanaryConfig | None) -> None:
        """A ``start_failed`` event, once for each ``error``. Says that the engine is unguarded, but in raise mode."""
        with self._lock:
            known = error in self._failures
            self._failures.add(error)
        if not known:
            if (config or CanaryConfig.readable()).mode != "raise":
                error += "; until that is corrected the engine runs unguarded"
            self.emit(Event("start_failed", "error", {"error": error}))

    def tell_unknown_settings(self, only_near: bool = False) -> None:
        """An ``unknown_setting`` event for each variable ``CANARY_*`` without a setting; a second call reports only new
        ones. A warning where a setting has a similar name; other variables may be somebody else's, and are left out
        with ``only_near``."""
        with self._lock:
            unknown = {name: near for name, near in unknown_variables().items() if name not in self._unknown}
            unknown = {name: near for name, near in unknown.items() if near or not only_near}
            self._unknown |= unknown.keys()
        for name, near in unknown.items():
            hint = f"did you mean {near}?" if near else "not a setting of Canary; canary config lists them"
            self.emit(Event("unknown_setting", "warning" if near else "info", {"variable": name, "hint": hint}))

    def emit(self, event: Event) -> None:
        """Passes ``event`` to every plugin of the manager, see `canary_core.emit`."""
        emit(event, self.manager)

    def _configure(self, plugin: Plugin, config: CanaryConfig) -> None:
        error = self._attempt(plugin, "canary_configure", config=config, manager=self.manager)
        if error is not None:
            self._drop(plugin, error)

    def _install_one(self, plugin: Plugin, config: CanaryConfig) -> str | None:
        try:
            config = self.require_engine(plugin, self._targets(plugin), config)
        except PluginError as refused:
            return str(refused)
        error = self._attempt(plugin, "canary_install", config=config)
        if error is not None:
            undone = self._attempt(plugin, "canary_uninstall")
            if undone is not None:
                error = f"{error}; and undoing it failed: {undone}"
        return error

    def _targets(self, plugin: Plugin) -> Iterator[HookTarget | str]:
        """`canary_targets` of one plugin, called when the first is taken: the call may import the engine."""
        others = [p for p in self.manager.get_plugins() if p is not plugin.target]
        try:
            yield from (t for some in self.manager.subset_hook_caller("canary_targets", others)() for t in some)
        except Exception as error:
            raise PluginError(f"canary_targets of plugin {plugin.name!r} raised {error_text(error)}") from error

    def _tell_untested(self, plugin: str, engine: EngineInfo, audited: int) -> None:
        with self._lock:
            if (engine.name, engine.version) in self._untested:
                return
            self._untested.add((engine.name, engine.version))
        fields: dict[str, object] = {
            "plugin": plugin,
            "engine": engine.name,
            "version": engine.version,
            "tested": engine.supported_range,
            "audited_forwards": audited,
            "reason": f"{engine.name} {engine.version} is newer than what the plugin was tested with. The functions "
            f"that it hooks were found; the first {audited} forwards are audited, and if that fails, Canary is "
            "switched off",
            "hint": "CANARY_UNTESTED=refuse leaves an engine that is newer than tested alone",
        }
        self.emit(Event("untested_engine", "warning", fields))

    def _drop(self, plugin: Plugin, error: str) -> None:
        """Drops an unusable plugin: none of its hooks is called any more. Raises `PluginError` for a built-in one."""
        if plugin.built_in:
            raise PluginError(error)
        self.manager.unregister(name=plugin.name)
        self._loaded[plugin.name] = replace(plugin, error=error)

    def _attempt(self, plugin: Plugin, hook: str, **arguments: object) -> str | None:
        """Calls one hook of one plugin; returns its exception as text. A finding is no error of the plugin."""
        others = [p for p in self.manager.get_plugins() if p is not plugin.target]
        try:
            self.manager.subset_hook_caller(hook, others)(**arguments)
        except ViolationError:
            raise
        except Exception as error:
            return f"{hook} of plugin {plugin.name!r} raised {error_text(error)}"
        return None

    def _tell(self, event: str, done: str, plugins: Sequence[Plugin]) -> None:
        failed = {p.name: p.error for p in plugins if p.error is not None}
        names = [p.name for p in plugins if p.error is None]
        self.emit(Event(event, "error" if failed else "info", {done: names, "failed": failed}))


def _not_as_needed(plugin: Plugin, missing: Sequence[str]) -> str:
    """The sentence about functions of the engine that are missing, or unlike the plugin's needs."""
    engine = plugin.engine
    have = "the engine" if engine is None else f"{engine.name} {engine.version}"
    other = "" if engine is None else f"{engine.name}{engine.supported_range} or "
    return (
        f"plugin {plugin.name!r} can't hook {have}, which is left as it is: {'; '.join(missing)}. Install {other}a "
        f"release of {plugin.distribution} that supports it"
    )
