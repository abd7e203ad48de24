"""Finds plugins, imports and inspects them: entry points of the group ``canary``, and Canary's own in `BUILT_IN`."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import metadata
from inspect import Parameter, signature

import pluggy

from canary_core.errors import error_text
from canary_core.installed import version
from canary_core.plugins import hookspecs
from canary_core.plugins.plugin import Plugin
from canary_core.runtime.telling import REPORTING

GROUP = "canary"
"""Entry-point group in which plugins are declared."""

PUBLISHED = ("sglang", "transformers", "vllm")
"""Canary's own engine plugins, in distributions of their own."""

BUILT_IN = (
    metadata.EntryPoint(REPORTING, "canary_desk.log:Reporting", GROUP),
    metadata.EntryPoint("incidents", "canary_desk.incidents.plugin:Investigations", GROUP),
    metadata.EntryPoint("notify", "canary_desk.notify.plugin:Notify", GROUP),
    metadata.EntryPoint("faults", "canary_kit.faults.injector:ConfiguredFaults", GROUP),
    metadata.EntryPoint("metrics", "canary_desk.metrics.plugin:Metrics", GROUP),
    metadata.EntryPoint("control", "canary_desk.control.plugin:Control", GROUP),
)
"""Canary's own plugins by import path, in order of registration: before all others, in every manager. They are not
declared as entry points, known only where Canary is installed, not where it is on ``PYTHONPATH``."""


def new_manager() -> pluggy.PluginManager:
    """A manager with Canary's hooks, without any plugin."""
    new = pluggy.PluginManager("canary")
    new.add_hookspecs(hookspecs)
    return new


def built_in() -> tuple[Plugin, ...]:
    """Canary's own plugins, made anew: each manager has its own."""
    own = version("canary-core")
    found = (Plugin(point.name, "canary-core", own, built_in=True) for point in BUILT_IN)
    return tuple(_load(plugin, point) for plugin, point in zip(found, BUILT_IN, strict=True))


def installed() -> tuple[Plugin, ...]:
    """Every plugin of the environment, allowed by ``CANARY_PLUGINS`` or not, the built-in ones first. Imports the
    plugins, to ask for their hooks and engines, but neither registers nor installs them."""
    return (*built_in(), *(inspect(name, points) for name, points in sorted(entry_points().items())))


def entry_points() -> dict[str, list[metadata.EntryPoint]]:
    """Entry points of the group by name; several of one name come from several distributions."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def as_installed(names: Iterable[str], found: Iterable[str]) -> tuple[str, ...]:
    """``names`` in the spelling of the installed plugins ``found``, each once: case does not matter, unless two plugins
    differ in nothing else. Unknown names stay unchanged."""
    names, known = list(names), list(found)
    alike = {name: [k for k in known if k.casefold() == name.casefold()] for name in names if name not in known}
    return tuple(dict.fromkeys(alike[n][0] if len(alike.get(n, ())) == 1 else n for n in names))


def not_installed(names: Iterable[str], found: Iterable[str]) -> tuple[Plugin, ...]:
    """The plugins among ``names`` outside of ``found``, the names of the installed plugins; each with its error."""
    known = sorted(found)
    return tuple(Plugin(n, error=_not_installed(n, known)) for n in as_installed(names, known) if n not in known)


def _not_installed(name: str, known: Sequence[str]) -> str:
    if name in (point.name for point in BUILT_IN):
        return f"CANARY_PLUGINS names {name!r}, which is part of Canary and always on; take it out"
    # The name of the distribution, canary-vllm, is a plugin's name but for its head.
    short = name.casefold().replace("_", "-").removeprefix("canary-")
    by_fold = {k.casefold(): k for k in (*PUBLISHED, *known)}
    close = difflib.get_close_matches(short, list(by_fold), n=1)
    # Never a command with a name that nobody has checked: whoever owns a misspelt one on an index would be run.
    if short in PUBLISHED:
        advice = f"Install it: pip install canary-{short}"
    elif close:
        near = by_fold[close[0]]
        advice = f"Did you mean {near!r}" + ("?" if near in known else f" (pip install canary-{near})?")
    else:
        advice = "Correct the name, or install the distribution that has the plugin"
    there = ", ".join(known) or "none"
    return f"CANARY_PLUGINS names {name!r}, which is not installed; installed plugins: {there}. {advice}"


def inspect(name: str, points: Sequence[metadata.EntryPoint]) -> Plugin:
    """Imports and examines the plugin declared by ``points``, all of the same name. Touches no manager in use; never
    raises."""
    plugin = Plugin(name)
    if len(points) > 1:
        homes = ", ".join(sorted(_home(p)[0] or "?" for p in points))
        return replace(plugin, error=f"several distributions declare plugin {name!r}: {homes}; uninstall all but one")
    distribution, version = _home(points[0])
    plugin = replace(plugin, distribution=distribution, version=version)
    if name in (point.name for point in BUILT_IN):
        return replace(plugin, error=f"plugin {name!r} of {distribution} has the name of a built-in plugin; rename it")
    return _load(plugin, points[0])


def _load(plugin: Plugin, point: metadata.EntryPoint) -> Plugin:
    """Imports and examines the object named by ``point``. A class is instantiated, so that no two managers share an
    object."""
    try:
        target = point.load()
        if isinstance(target, type):
            target = target()
    except Exception as error:
        return replace(plugin, error=f"plugin {plugin.name!r} ({point.value}) can't be imported: {error_text(error)}")
    return _examine(replace(plugin, target=target))


def _examine(plugin: Plugin) -> Plugin:
    """Fills in hooks and engine of an imported plugin, or the error. Registers the plugin in a manager made on purpose,
    so that an unfit one leaves no trace in the real one."""
    declared = hookspecs.PROTOCOL if plugin.built_in else getattr(plugin.target, "CANARY_PROTOCOL", None)
    plugin = replace(plugin, protocol=declared if type(declared) is int else None)
    foreign = _foreign_protocol(plugin, declared)
    if foreign is not None:
        return replace(plugin, error=foreign)
    trial = new_manager()
    misfit = _unknown_arguments(plugin.target, trial)
    if misfit:
        return replace(plugin, error=f"plugin {plugin.name!r} does not fit Canary's hooks: {misfit}")
    try:
        trial.register(plugin.target, name=plugin.name)
        trial.check_pending()
    except Exception as error:
        return replace(plugin, error=f"plugin {plugin.name!r} does not fit Canary's hooks: {error}{_nearest(trial)}")
    hooks = tuple(sorted(h.name for h in trial.get_hookcallers(plugin.target) or ()))
    plugin = replace(plugin, hooks=hooks, warnings=_halves(plugin.name, hooks))
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
        return replace(plugin, error=f"canary_engine of plugin {plugin.name!r} raised {error_text(error)}")
    return replace(plugin, engine=engines[0]) if engines else plugin


def _foreign_protocol(plugin: Plugin, declared: object) -> str | None:
    """Why the plugin is not for these hooks, by its ``declared`` protocol; None if it is."""
    spoken, ours = 1 if declared is None else declared, hookspecs.PROTOCOL
    head = f"plugin {plugin.name!r} of {plugin.distribution} {plugin.version}"
    if not isinstance(spoken, int) or isinstance(spoken, bool):
        return (
            f"{head} has CANARY_PROTOCOL = {spoken!r}, which must be an integer; write the number of the "
            f"canary_core.PROTOCOL that it was written for (here {ours})"
        )
    if spoken == ours:
        return None
    if spoken > ours:
        fix = f"install a newer canary-core, or a release of {plugin.distribution} for protocol {ours}"
    else:
        fix = f"install a newer release of {plugin.distribution}, or a canary-core that speaks protocol {spoken}"
    said = "" if declared is not None else " (it has no CANARY_PROTOCOL, which counts as 1)"
    return f"{head} speaks protocol {spoken} of Canary{said}, and this canary-core speaks {ours}; {fix}"


def _unknown_arguments(target: object, trial: pluggy.PluginManager) -> str:
    """Names each argument of ``target``'s hooks unknown to Canary; empty if there is none."""
    unknown = []
    for name in _hook_names():
        function = getattr(target, name, None)
        if not callable(function) or trial.parse_hookimpl_opts(target, name) is None:
            continue
        given = list(signature(getattr(hookspecs, name)).parameters)
        named = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        taken = [p.name for p in signature(function).parameters.values() if p.kind in named and p.default is p.empty]
        wrong = [repr(argument) for argument in taken if argument not in given]
        if wrong:
            there = f"its arguments are {', '.join(given)}" if given else "it has no arguments"
            unknown.append(f"{name} takes {', '.join(wrong)}, which that hook does not give; {there}")
    return "; ".join(unknown)


def _halves(name: str, hooks: Sequence[str]) -> tuple[str, ...]:
    """Missing hooks of a plugin with one hook of a pair, with the consequence."""
    return tuple(
        f"plugin {name!r} has {one} without {other}: {meaning}"
        for one, other, meaning in PAIRS
        if one in hooks and other not in hooks
    )


PAIRS = (
    ("canary_install", "canary_engine", "no version of its engine is ever refused; say which engine it is for"),
    ("canary_install", "canary_uninstall", "what it hooks stays hooked, also where it fails half-way; undo it there"),
    ("canary_engine", "canary_install", "it hooks nothing, so naming it in CANARY_PLUGINS guards nothing by itself"),
    ("canary_uninstall", "canary_install", "there is nothing to undo; hook the engine in canary_install"),
    ("canary_targets", "canary_install", "nobody asks for them; hook the engine in canary_install"),
)
"""Pairs of hooks: one, the other, and the consequence if the other is missing."""


def _hook_names() -> list[str]:
    """Names of all hooks, in the order of `hookspecs`."""
    return [n for n in vars(hookspecs) if n.startswith("canary_")]


def _nearest(trial: pluggy.PluginManager) -> str:
    """A hint for each hook without a specification."""
    names = _hook_names()
    hints = []
    for unknown in (n for n in vars(trial.hook) if not n.startswith("_") and n not in names):
        close = difflib.get_close_matches(unknown, names, n=1)
        hints.append(f"did you mean {close[0]}?" if close else f"the hooks are {', '.join(names)}")
    return f"; {' '.join(hints)}" if hints else ""


def _home(point: metadata.EntryPoint) -> tuple[str | None, str | None]:
    """Distribution of an entry point, and its version."""
    return (point.dist.name, point.dist.version) if point.dist else (None, None)
