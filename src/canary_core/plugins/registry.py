"""Finds, loads and installs plugins: `start` is all that an engine's own plugin loader needs to call.

A plugin is an object (usually a module) with hook implementations, declared as an entry point of the group
``canary``. `load` registers those that ``CANARY_PLUGINS`` allows, `install` lets them hook their engines. One broken
plugin is recorded with its error and takes nothing else down.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from threading import RLock
from typing import Any

import pluggy
from packaging.specifiers import SpecifierSet

from canary_core import faults, hookspecs
from canary_core.config import CanaryConfig
from canary_core.errors import CanaryError, PluginError, ViolationError
from canary_core.events import Event
from canary_core.reporting.log import Reporting

GROUP = "canary"
"""Entry-point group in which plugins are declared."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine a plugin is for. ``version`` is the installed one, None if the engine isn't installed;
    ``supported_range`` is the text shown to users, e.g. ``>=5.17,<6``."""

    name: str
    version: str | None
    supported_range: str
    supported: bool

    @classmethod
    def of(cls, distribution: str, supported_range: str) -> "EngineInfo":
        """Looks the installed version up without importing the engine. ``supported_range`` is a PEP 440 specifier;
        release candidates inside of it count as supported."""
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return cls(distribution, None, supported_range, supported=False)
        fits = SpecifierSet(supported_range).contains(version, prereleases=True)
        return cls(distribution, version, supported_range, supported=fits)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin as found: where it comes from, what it implements, or why it can't be used (``error``)."""

    name: str
    distribution: str | None = None
    version: str | None = None
    hooks: tuple[str, ...] = ()
    engine: EngineInfo | None = None
    error: str | None = None
    built_in: bool = False
    """Part of Canary itself, and so on without being named in ``CANARY_PLUGINS``."""
    target: Any = field(default=None, repr=False, compare=False)
    """The registered object; None if it could not be loaded."""


class Plugins:
    """One pluggy manager and the plugins loaded into it. Thread-safe; use `manager` and its neighbours for the one of
    this process."""

    def __init__(self) -> None:
        self.manager = _new_manager()
        self.reporting = Reporting()
        self.manager.register(self.reporting, name="reporting")
        self._lock = RLock()
        self._loaded: dict[str, Plugin] = {}
        self._hooked: list[str] = []

    @property
    def loaded(self) -> tuple[Plugin, ...]:
        """Every plugin that `load` has tried, in order, the failed ones included."""
        return tuple(self._loaded.values())

    def load(self, config: CanaryConfig) -> tuple[Plugin, ...]:
        """Registers the plugins that ``config.plugins`` names and returns all tried so far. A second call tries only
        new names. Ends with a ``plugins_loaded`` event if there was anything to try.

        Raises `PluginError`, before anything is loaded, if a name isn't installed, `ConfigError` if ``config.faults``
        can't be understood. A plugin that is installed but broken does not raise: its `Plugin.error` says why, and the
        others are loaded.
        """
        with self._lock:
            self.reporting.use(config)
            if config.mode != "off":
                faults.enable(config.faults, config.seed, self.manager)
            names = [n for n in dict.fromkeys(config.plugins) if n not in self._loaded]
            if not names:
                return self.loaded
            found = _entry_points()
            _require_installed(names, found)
            for name in names:
                plugin = _inspect(name, found[name])
                if plugin.error is None:
                    self.manager.register(plugin.target, name=name)
                self._loaded[name] = plugin
            self._tell("plugins_loaded", "loaded", [self._loaded[n] for n in names])
            return self.loaded

    def install(self, config: CanaryConfig) -> tuple[Plugin, ...]:
        """Calls `canary_install` of each loaded plugin once, after its engine's version was found supported, and
        returns all plugins. In mode off nothing is installed. Ends with a ``plugins_installed`` event.

        A plugin whose engine is missing or out of range is refused, one that raises is undone: both are unregistered
        and keep the reason in `Plugin.error`. Never raises for a plugin's sake.
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
                    self.manager.unregister(name=plugin.name)
                    self._loaded[plugin.name] = replace(plugin, error=error)
            self._tell("plugins_installed", "installed", [self._loaded[p.name] for p in ready])
            return self.loaded

    def uninstall(self) -> None:
        """Calls `canary_uninstall` of every installed plugin, last installed first. They stay loaded, so that
        `install` can follow. Ends with a ``plugins_uninstalled`` event; never raises for a plugin's sake.

        Raises `ViolationError`, when all are uninstalled, for the first finding that closing brought in raise mode.
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

    def emit(self, event: Event) -> None:
        """Hands ``event`` to every plugin's `canary_event`. Built-in reporting comes first; an exception of another
        plugin is reported as a ``reporting_failed`` event and goes no further."""
        emit(event, self.manager)

    def _install_one(self, plugin: Plugin, config: CanaryConfig) -> str | None:
        refused = refusal(plugin)
        if refused is not None:
            return refused
        error = self._attempt(plugin, "canary_install", config=config)
        if error is not None:
            undone = self._attempt(plugin, "canary_uninstall")
            if undone is not None:
                error = f"{error}; and undoing it failed: {undone}"
        return error

    def _attempt(self, plugin: Plugin, hook: str, **arguments: object) -> str | None:
        """Calls one hook of one plugin; gives the error it raised as text. A finding is no error of the plugin."""
        others = [p for p in self.manager.get_plugins() if p is not plugin.target]
        try:
            self.manager.subset_hook_caller(hook, others)(**arguments)
        except ViolationError:
            raise
        except Exception as error:
            return f"{hook} of plugin {plugin.name!r} raised {_text(error)}"
        return None

    def _tell(self, event: str, done: str, plugins: Sequence[Plugin]) -> None:
        failed = {p.name: p.error for p in plugins if p.error is not None}
        names = [p.name for p in plugins if p.error is None]
        self.emit(Event(event, "error" if failed else "info", {done: names, "failed": failed}))


def installed() -> tuple[Plugin, ...]:
    """Every plugin of this environment, allowed by ``CANARY_PLUGINS`` or not, the built-in ones first. Imports the
    plugins, to ask for their hooks and engines, but neither registers nor installs them."""
    own = _distribution_version("canary-core")
    built_in = _examine(Plugin("reporting", "canary-core", own, built_in=True, target=Reporting()))
    return (built_in, *(_inspect(name, points) for name, points in sorted(_entry_points().items())))


_process: Plugins | None = None
_process_lock = RLock()


def process() -> Plugins:
    """The `Plugins` of this process, made at the first call."""
    global _process
    with _process_lock:
        if _process is None:
            _process = Plugins()
        return _process


def manager() -> pluggy.PluginManager:
    """The pluggy manager of this process, with built-in reporting and whatever `load` has added."""
    return process().manager


def load(config: CanaryConfig | None = None) -> tuple[Plugin, ...]:
    """`Plugins.load` for this process; without ``config``, by the environment."""
    return process().load(config or CanaryConfig.load())


def install(config: CanaryConfig | None = None) -> tuple[Plugin, ...]:
    """`Plugins.install` for this process; without ``config``, by the environment."""
    return process().install(config or CanaryConfig.load())


def uninstall() -> None:
    """`Plugins.uninstall` for this process."""
    process().uninstall()


def start(config: CanaryConfig | None = None) -> tuple[Plugin, ...]:
    """Loads and installs what ``CANARY_PLUGINS`` allows: the function an engine's own plugin loader calls. Cheap where
    it is empty; a second call changes nothing.

    Raises `ConfigError` or `PluginError`, after a ``start_failed`` event, since engines swallow what their plugins
    raise. In raise mode a plugin that could not be loaded or installed is such an error too: a test that was to run
    guarded must not pass unguarded.
    """
    try:
        config = config or CanaryConfig.load()
        process().load(config)
        started = process().install(config)
        errors = [p.error for p in started if p.error is not None]
        if errors and config.mode == "raise":
            raise PluginError("; ".join(errors))
        return started
    except CanaryError as error:
        process().emit(Event("start_failed", "error", {"error": str(error)}))
        raise


def emit(event: Event, hooks: pluggy.PluginManager | None = None) -> None:
    """Hands ``event`` to every plugin's `canary_event`, this process's by default. An exception of a plugin is
    reported as a ``reporting_failed`` event, which only built-in reporting sees, and goes no further."""
    hooks = manager() if hooks is None else hooks
    try:
        hooks.hook.canary_event(event=event)
    except Exception as error:
        failed = Event("reporting_failed", "error", {"while_reporting": event.name, "error": _text(error)})
        reporting = hooks.get_plugin("reporting") or Reporting()
        reporting.canary_event(failed)


def _new_manager() -> pluggy.PluginManager:
    new = pluggy.PluginManager("canary")
    new.add_hookspecs(hookspecs)
    return new


def _entry_points() -> dict[str, list[metadata.EntryPoint]]:
    """Entry points of the group by name; several of one name come from several distributions."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _require_installed(names: Sequence[str], found: dict[str, list[metadata.EntryPoint]]) -> None:
    missing = [n for n in names if n not in found]
    if missing:
        raise PluginError(
            f"CANARY_PLUGINS names {', '.join(map(repr, missing))}, which is not installed; installed plugins: "
            f"{', '.join(sorted(found)) or 'none'}. Install it (pip install canary-{missing[0]}) or correct the name"
        )


def _inspect(name: str, points: Sequence[metadata.EntryPoint]) -> Plugin:
    """Imports and examines one plugin without touching any manager in use. Never raises."""
    plugin = Plugin(name)
    if len(points) > 1:
        homes = ", ".join(sorted(_home(p)[0] or "?" for p in points))
        return replace(plugin, error=f"several distributions declare plugin {name!r}: {homes}; uninstall all but one")
    distribution, version = _home(points[0])
    plugin = replace(plugin, distribution=distribution, version=version)
    try:
        target = points[0].load()
    except Exception as error:
        return replace(plugin, error=f"plugin {name!r} ({points[0].value}) can't be imported: {_text(error)}")
    return _examine(replace(plugin, target=target))


def _examine(plugin: Plugin) -> Plugin:
    """Fills in hooks and engine of an imported plugin, or the error. It is registered in a manager made for this, so
    that a plugin that doesn't fit leaves no trace in the real one."""
    trial = _new_manager()
    try:
        trial.register(plugin.target, name=plugin.name)
        trial.check_pending()
    except Exception as error:
        return replace(plugin, error=f"plugin {plugin.name!r} does not fit Canary's hooks: {error}{_nearest(trial)}")
    hooks = tuple(sorted(h.name for h in trial.get_hookcallers(plugin.target) or ()))
    plugin = replace(plugin, hooks=hooks)
    unmarked = [n for n in _hook_names() if n not in hooks and callable(getattr(plugin.target, n, None))]
    if unmarked:
        return replace(
            plugin,
            error=f"plugin {plugin.name!r} defines {', '.join(unmarked)} without @hookimpl, so it would never be "
            f"called; decorate it with canary_core.hookimpl",
        )
    if not hooks:
        return replace(
            plugin,
            error=f"plugin {plugin.name!r} implements no hook of Canary; its entry point must name an object with "
            f"functions marked by canary_core.hookimpl, got {plugin.target!r}",
        )
    try:
        engines = trial.hook.canary_engine()
    except Exception as error:
        return replace(plugin, error=f"canary_engine of plugin {plugin.name!r} raised {_text(error)}")
    return replace(plugin, engine=engines[0]) if engines else plugin


def refusal(plugin: Plugin) -> str | None:
    """Why the plugin's engine can't be hooked, None if it can."""
    engine = plugin.engine
    if engine is None or engine.supported:
        return None
    fix = f"install {engine.name}{engine.supported_range} or a release of {plugin.distribution} that supports it"
    if engine.version is None:
        return f"plugin {plugin.name!r} supports {engine.name} {engine.supported_range}, which is not installed; {fix}"
    return (
        f"plugin {plugin.name!r} supports {engine.name} {engine.supported_range}, got {engine.name} {engine.version}; "
        f"{fix}"
    )


def _hook_names() -> list[str]:
    """Names of all hooks, in the order of `hookspecs`."""
    return [n for n in vars(hookspecs) if n.startswith("canary_")]


def _nearest(trial: pluggy.PluginManager) -> str:
    """A hint for each hook that has no specification."""
    names = _hook_names()
    hints = []
    for unknown in (n for n in vars(trial.hook) if not n.startswith("_") and n not in names):
        close = difflib.get_close_matches(unknown, names, n=1)
        hints.append(f"did you mean {close[0]}?" if close else f"the hooks are {', '.join(names)}")
    return f"; {' '.join(hints)}" if hints else ""


def _home(point: metadata.EntryPoint) -> tuple[str | None, str | None]:
    """Distribution that declares an entry point, and its version."""
    return (point.dist.name, point.dist.version) if point.dist else (None, None)


def _distribution_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
